-- End attempts: free each lease once, and tell the breaker, the deferral and the limit of its worker.
-- An attempt whose lease is not there (settled before, or expired) changes nothing.
-- KEYS    per worker five: breaker, deferral, limit, leases, grants
-- ARGV    1: JSON {policy, ends: [{id, worker number from 1, epoch, verdict, reason, jitter, defer_s, halve}]}
-- return  how many leases were freed
-- include common
-- include breaker

local call = cjson.decode(ARGV[1])
local now = now_s()
local breakers = {}
local freed = 0

local function keys_of(number)
  local base = (number - 1) * 5
  return {breaker = KEYS[base + 1], deferral = KEYS[base + 2], limit = KEYS[base + 3],
          leases = KEYS[base + 4], grants = KEYS[base + 5]}
end

local function defer(key, seconds, reason)
  local until_s = now + seconds
  local standing = tonumber(redis.call('HGET', key, 'until') or '0')
  if until_s > standing then
    redis.call('HSET', key, 'until', stamp(until_s), 'reason', reason)
    redis.call('PEXPIREAT', key, string.format('%d', math.ceil(until_s * 1000)))
  end
end

local function set_limit(key, value, reason)
  redis.call('HSET', key, 'value', string.format('%d', value), 'reason', reason, 'since', stamp(now))
  redis.call('HINCRBY', key, 'version', 1)
  drop_evidence(key)
end

-- A burst of refusals is one event: only attempts granted after the last halving halve again.
local function halve(key, granted, reason)
  local halved_at = tonumber(redis.call('HGET', key, 'halved_at') or '0')
  local value = tonumber(redis.call('HGET', key, 'value') or '0')
  if value > 0 and granted > halved_at then
    set_limit(key, math.max(1, math.floor(value / 2)), reason)
    redis.call('HSET', key, 'halved_at', stamp(now))
  end
end

for _, attempt in ipairs(call.ends) do
  local keys = keys_of(attempt.worker)
  if redis.call('ZREM', keys.leases, attempt.id) == 1 then
    freed = freed + 1
    local granted = tonumber(redis.call('ZSCORE', keys.grants, attempt.id) or '0')
    redis.call('ZREM', keys.grants, attempt.id)
    local breaker = breakers[attempt.worker] or breaker_load(keys.breaker)
    breakers[attempt.worker] = breaker
    local healed = breaker_report(breaker, attempt.id, attempt.epoch, attempt.verdict, now, call.policy,
                                  attempt.reason, attempt.jitter)
    if healed then
      local value = tonumber(redis.call('HGET', keys.limit, 'value') or '1')
      set_limit(keys.limit, math.min(value, call.policy.restart_limit), 'healed: restarts low')
    end
    if attempt.defer_s > 0 then
      defer(keys.deferral, attempt.defer_s, attempt.reason)
    end
    if attempt.halve then
      halve(keys.limit, granted, attempt.reason)
    end
  end
end
for number, breaker in pairs(breakers) do
  breaker_save(keys_of(number).breaker, breaker)
end
return freed
