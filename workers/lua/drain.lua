-- Ask a worker to take no new lease.
-- KEYS    worker
-- ARGV    1: seconds until it is removed even with leases
-- return  1 when it is there, else 0
-- include common

if redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
local now = now_s()
redis.call('HSET', KEYS[1], 'state', 'draining', 'since', stamp(now), 'drain_until', stamp(now + tonumber(ARGV[1])))
return 1
