-- Close a worker's breaker by hand; outcomes of what was sent before are ignored (next epoch).
-- KEYS    worker, breaker
-- return  1 when the worker is there, else 0
-- include common
-- include breaker

if redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
local breaker = breaker_load(KEYS[2])
breaker_reset_to(breaker, {epoch = breaker.epoch + 1, trips = 0, healthy_since = now_s()})
breaker_save(KEYS[2], breaker)
return 1
