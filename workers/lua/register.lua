-- Register a worker, or the next incarnation of one that is there.
-- KEYS    workers, workers:generation, worker, load, limit, breaker, deferral, memo
-- ARGV    1: id; 2: JSON of the spec's fields as strings; 3: first limit; 4: "replace" or "keep"; 5: origin
-- return  [incarnation, created | replaced | kept]
-- include common
-- include breaker

local spec = cjson.decode(ARGV[2])
local function same_spec()
  local standing = hash(KEYS[3])
  for name, value in pairs(spec) do
    if (standing[name] or '') ~= value then
      return false
    end
  end
  return standing.state ~= 'draining'
end

local known = redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 1
if known and ARGV[4] == 'keep' and same_spec() then
  return {tonumber(redis.call('HGET', KEYS[3], 'incarnation')), 'kept'}
end
local breaker = breaker_load(KEYS[6])
redis.call('DEL', KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8])
local incarnation = redis.call('INCR', KEYS[2])
local now = stamp(now_s())
local fields = {'state', 'starting', 'incarnation', incarnation, 'registered_at', now, 'since', now,
                'origin', ARGV[5]}
for name, value in pairs(spec) do
  fields[#fields + 1] = name
  fields[#fields + 1] = value
end
redis.call('HSET', KEYS[3], unpack(fields))
redis.call('HSET', KEYS[5], 'value', ARGV[3], 'reason', 'first limit', 'since', now, 'version', '1')
if known then -- what was sent to its earlier life ends in an earlier epoch, and counts for nothing
  breaker_reset_to(breaker, {epoch = breaker.epoch + 1, trips = 0, healthy_since = now_s()})
  breaker_save(KEYS[6], breaker)
end
redis.call('SADD', KEYS[1], ARGV[1])
return {incarnation, known and 'replaced' or 'created'}
