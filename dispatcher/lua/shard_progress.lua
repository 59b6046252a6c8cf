-- Say how far a shard is, in absolute numbers, so that repeating it changes nothing; the batch's sums follow.
-- KEYS    batch, shards
-- ARGV    1: shard; 2: claim; 3: who; 4: running or done; 5..9: completed, failed, prompt, completion, cost
-- return  [1 while the claim stands, else 0; shards done; shards of the batch; status]
-- include common

local standing = redis.call('HGET', KEYS[2], ARGV[1]) or ''
if string.match(standing, 'claim=(%d+)') ~= ARGV[2] then
  return {0, 0, 0, redis.call('HGET', KEYS[1], 'status') or ''}
end
local names = {'completed', 'failed', 'prompt', 'completion', 'cost'}
local sums = {completed = 'completed', failed = 'failed', prompt = 'prompt_tokens',
              completion = 'completion_tokens', cost = 'cost_done'}
local parts = {}
for i, name in ipairs(names) do
  local before = tonumber(string.match(standing, ' ' .. name .. '=(%d+)') or '0')
  local now = tonumber(ARGV[4 + i])
  if now ~= before then
    redis.call('HINCRBY', KEYS[1], sums[name], string.format('%d', now - before))
  end
  parts[#parts + 1] = name .. '=' .. string.format('%d', now)
end
if ARGV[4] == 'done' and string.match(standing, 'state=(%w+)') ~= 'done' then
  redis.call('HINCRBY', KEYS[1], 'shards_done', 1)
end
redis.call('HSET', KEYS[2], ARGV[1], string.format('claim=%s state=%s by=%s %s',
           ARGV[2], ARGV[4], ARGV[3], table.concat(parts, ' ')))
return {1, tonumber(redis.call('HGET', KEYS[1], 'shards_done') or '0'),
        tonumber(redis.call('HGET', KEYS[1], 'shards') or '0'), redis.call('HGET', KEYS[1], 'status') or ''}
