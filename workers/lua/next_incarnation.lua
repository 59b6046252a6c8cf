-- A worker was seen to live a new life: start its next incarnation, once.
-- KEYS    worker, workers:generation, load, memo
-- ARGV    1: incarnation that was watched; 2: why
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
return incarnation
