-- A worker was seen to live a new life: start its next incarnation, once.
-- KEYS    worker, workers:generation, load, memo, limit
-- ARGV    1: incarnation that was watched; 2: why; 3: first limit of a worker of which no slots are told
-- return  the incarnation that now stands; 0 when there is no such worker
-- include common

local standing = redis.call('HGET', KEYS[1], 'incarnation')
if not standing then
  return 0
end
if standing ~= ARGV[1] then
  return tonumber(standing)
end
local incarnation = redis.call('INCR', KEYS[2])
redis.call('DEL', KEYS[3], KEYS[4])
redis.call('HSET', KEYS[1], 'incarnation', incarnation, 'incarnation_reason', ARGV[2])
local first = redis.call('HGET', KEYS[1], 'max_running')
if not first or first == '' then
  first = ARGV[3]
end
redis.call('DEL', KEYS[5])
redis.call('HSET', KEYS[5], 'value', first, 'reason', 'first limit of a new life', 'since', stamp(now_s()), 'version', '1')
return incarnation
