-- Shards that were counted done turn out not to be: they may be run again, and the batch is in progress again.
-- Nobody holds them, so whoever claims one next is not told of a death.
-- KEYS    batch, shards
-- ARGV    1..: shards
-- return  the status that stands; it was finalizing or in_progress, or nothing has changed

local status = redis.call('HGET', KEYS[1], 'status') or ''
if status ~= 'finalizing' and status ~= 'in_progress' then
  return status
end
for i = 1, #ARGV do
  local shard = ARGV[i]
  local standing = redis.call('HGET', KEYS[2], shard) or ''
  if string.match(standing, 'state=(%w+)') == 'done' then
    redis.call('HSET', KEYS[2], shard, (string.gsub(standing, 'state=done', 'state=open', 1)))
    redis.call('HINCRBY', KEYS[1], 'shards_done', -1)
  end
end
redis.call('HSET', KEYS[1], 'status', 'in_progress')
return 'in_progress'
