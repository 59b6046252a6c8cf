-- Claim a shard: the next claim number fences every older holder. A shard that is done stays done.
-- A claim that still stands as running has died: whoever ends one in an orderly way hands it back first. Its
-- death counts against a line if that was the whole group that this very claim had noted. A call that is
-- repeated, since its answer was lost, gets the claim that it made.
-- KEYS    batch, shards
-- ARGV    1: shard; 2: who claims; 3: the call, a word like no other's
-- return  [claim, status of the batch, the shard's text]; claim 0 when the batch is not in progress, or not there
-- include shard

local status = redis.call('HGET', KEYS[1], 'status') or ''
if status ~= 'in_progress' then
  return {0, status, ''}
end
local shard = read_shard(redis.call('HGET', KEYS[2], ARGV[1]))
if shard.call == ARGV[3] and shard.state ~= 'open' then
  return {tonumber(shard.claim), status, write_shard(shard)}
end
if shard.state == 'running' then
  shard.died = with_claim(shard.died, shard.claim)
  local first, last, noter = string.match(shard.group or '', '(%d+)-(%d+)@(%d+)')
  if first and first == last and noter == shard.claim then
    shard.alone = with_claim(shard.alone, shard.claim)
  end
end
local claim = tonumber(shard.claim or '0') + 1
shard.claim = string.format('%d', claim)
shard.state = shard.state == 'done' and 'done' or 'running'
shard.by = ARGV[2]
shard.call = ARGV[3]
for _, count in ipairs({'completed', 'failed', 'prompt', 'completion', 'cost'}) do
  shard[count] = shard[count] or '0'
end
local text = write_shard(shard)
redis.call('HSET', KEYS[2], ARGV[1], text)
return {claim, status, text}
