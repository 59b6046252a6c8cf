-- Move a batch to another status, if it stands in one of those from which that may be.
-- KEYS    batch, shards
-- ARGV    1: new status; 2: how long what is known of its shards stays from then on (s), 0: as long as the batch;
--         3: how many old statuses follow; the old ones; then field, value, ... to write with it
-- return  [1, new status] when moved, else [0, the status that stands, '' when there is no batch]
-- include common

local standing = redis.call('HGET', KEYS[1], 'status')
if not standing then
  return {0, ''}
end
local count = tonumber(ARGV[3])
for i = 4, 3 + count do
  if ARGV[i] == standing then
    redis.call('HSET', KEYS[1], 'status', ARGV[1], ARGV[1] .. '_at', stamp(now_s()))
    if #ARGV > 3 + count then
      redis.call('HSET', KEYS[1], unpack(ARGV, 4 + count))
    end
    if tonumber(ARGV[2]) > 0 then
      redis.call('EXPIRE', KEYS[2], ARGV[2])
    end
    return {1, ARGV[1]}
  end
end
return {0, standing}
