-- A claim on a shard ends in an orderly way, or turns out to live: it has not died, whatever comes next.
-- KEYS    shards
-- ARGV    1: shard; 2: claim; 3: who claimed
-- return  1 when the claim stood, 0 when a later one does, or the shard is not known
-- include shard

local text = redis.call('HGET', KEYS[1], ARGV[1])
if not text then
  return 0
end
local shard = read_shard(text)
local stands = shard.claim == ARGV[2] and shard.by == ARGV[3]
if stands and shard.state == 'running' then
  shard.state = 'open'
end
if not stands then
  shard.died = without_claim(shard.died, ARGV[2])
  shard.alone = without_claim(shard.alone, ARGV[2])
end
redis.call('HSET', KEYS[1], ARGV[1], write_shard(shard))
return stands and 1 or 0
