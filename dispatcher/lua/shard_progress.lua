-- Say how far a shard is, in absolute numbers, so that repeating it changes nothing; the batch's sums follow.
-- Done is done: a running report that comes late, or from whoever looks through it again, changes nothing; nor
-- does any report once the batch is being finalised, whose sums are counted from its files.
-- KEYS    batch, shards
-- ARGV    1: shard; 2: claim; 3: who; 4: running or done; 5..9: completed, failed, prompt, completion, cost
-- return  [1 while the claim stands, else 0; shards done; shards of the batch; status]
-- include shard

local shard = read_shard(redis.call('HGET', KEYS[2], ARGV[1]))
local status = redis.call('HGET', KEYS[1], 'status') or ''
-- The number alone does not tell: claims are counted from 1 again when Redis has lost its data.
if shard.claim ~= ARGV[2] or shard.by ~= ARGV[3] then
  return {0, 0, 0, status}
end
local was_done = shard.state == 'done'
local function answer()
  return {1, tonumber(redis.call('HGET', KEYS[1], 'shards_done') or '0'),
          tonumber(redis.call('HGET', KEYS[1], 'shards') or '0'), status}
end

if (was_done and ARGV[4] ~= 'done') or (status ~= 'in_progress' and status ~= 'cancelling') then
  return answer()
end
local names = {'completed', 'failed', 'prompt', 'completion', 'cost'}
local sums = {completed = 'completed', failed = 'failed', prompt = 'prompt_tokens',
              completion = 'completion_tokens', cost = 'cost_done'}
for i, name in ipairs(names) do
  local before = tonumber(shard[name] or '0')
  local now = tonumber(ARGV[4 + i])
  if now ~= before then
    redis.call('HINCRBY', KEYS[1], sums[name], string.format('%d', now - before))
  end
  shard[name] = string.format('%d', now)
end
if ARGV[4] == 'done' and not was_done then
  redis.call('HINCRBY', KEYS[1], 'shards_done', 1)
end
-- The last report of a claim that was handed back may come after that: the claim has not begun to run again.
if not (shard.state == 'open' and ARGV[4] == 'running') then
  shard.state = ARGV[4]
end
shard.by = ARGV[3]
redis.call('HSET', KEYS[2], ARGV[1], write_shard(shard))
return answer()
