-- Keep leases alive while their requests run; a lease that is gone is not brought back.
-- KEYS    per worker two: leases, breaker
-- ARGV    1: JSON {ttl_s, trial_s, leases: [[id, ...] for each worker]}
-- return  JSON list of the ids that are gone
-- include common
-- include breaker

local call = cjson.decode(ARGV[1])
local now = now_s()
local expiry = stamp(now + call.ttl_s)
local gone = {}
for number, ids in ipairs(call.leases) do
  local leases_key, breaker_key = KEYS[number * 2 - 1], KEYS[number * 2]
  local trial = redis.call('HGET', breaker_key, 'trial')
  for _, id in ipairs(ids) do
    if redis.call('ZSCORE', leases_key, id) then
      redis.call('ZADD', leases_key, expiry, id)
    else
      gone[#gone + 1] = id
    end
    if trial == id then
      redis.call('HSET', breaker_key, 'trial_until', stamp(now + call.trial_s))
    end
  end
end
if #gone == 0 then
  return '[]'
end
return cjson.encode(gone)
