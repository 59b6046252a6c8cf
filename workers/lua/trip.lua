-- Open a worker's breaker from outside: the monitor saw it stall, or a person asked. An open one stays as it is.
-- KEYS    worker, breaker
-- ARGV    1: incarnation, or "any"; 2: reason; 3: jitter; 4: JSON policy; 5: seconds to stay open, 0: by policy
-- return  1 when it opened now, else 0
-- include common
-- include breaker

local standing = redis.call('HGET', KEYS[1], 'incarnation')
if not standing or (ARGV[1] ~= 'any' and standing ~= ARGV[1]) then
  return 0
end
local now = now_s()
local breaker = breaker_load(KEYS[2])
local seconds = tonumber(ARGV[5])
if breaker.state == 'open' and seconds == 0 then
  return 0
end
breaker_open(breaker, now, cjson.decode(ARGV[4]), ARGV[2], tonumber(ARGV[3]))
if seconds > 0 then
  breaker.open_until = now + seconds
end
breaker_save(KEYS[2], breaker)
return 1
