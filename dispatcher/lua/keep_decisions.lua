-- Keep records of attempts, bounded by count and age; keeping one again changes nothing.
-- KEYS    decisions, then the decision key of each record's request, which may stand there more than once
-- ARGV    1: attempts kept of a request; 2: requests kept; 3: age at which a request is dropped (s);
--         then for each of those keys: its name in decisions, when the attempt was made (s), the record
-- return  names dropped from decisions; whoever calls drops their keys, which are not known before
-- include common

local first = 4
for i = 2, #KEYS do
  local name, at, record = ARGV[first], ARGV[first + 1], ARGV[first + 2]
  first = first + 3
  redis.call('ZADD', KEYS[i], at, record)
  redis.call('ZREMRANGEBYRANK', KEYS[i], 0, -tonumber(ARGV[1]) - 1)
  redis.call('PEXPIRE', KEYS[i], math.ceil(tonumber(ARGV[3]) * 1000))
  redis.call('ZADD', KEYS[1], 'GT', at, name)
end
local too_old = stamp(now_s() - tonumber(ARGV[3]))
local dropped = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', too_old)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', too_old)
local excess = redis.call('ZCARD', KEYS[1]) - tonumber(ARGV[2])
if excess > 0 then
  local oldest = redis.call('ZPOPMIN', KEYS[1], excess)
  for i = 1, #oldest, 2 do
    dropped[#dropped + 1] = oldest[i]
  end
end
return dropped
