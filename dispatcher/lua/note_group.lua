-- Note which lines of a shard are about to be sent; deaths that were counted of another group are forgotten.
-- KEYS    shards
-- ARGV    1: shard; 2: claim; 3: who claimed; 4, 5: the first and the last line of the group, by position in the shard
-- return  1 while the claim stands, else 0, and nothing is noted
-- include shard

local shard = read_shard(redis.call('HGET', KEYS[1], ARGV[1]))
if shard.claim ~= ARGV[2] or shard.by ~= ARGV[3] then
  return 0
end
local group = ARGV[4] .. '-' .. ARGV[5]
if string.match(shard.group or '', '^[%d-]+') ~= group then
  shard.alone = nil
end
shard.group = group .. '@' .. ARGV[2]
redis.call('HSET', KEYS[1], ARGV[1], write_shard(shard))
return 1
