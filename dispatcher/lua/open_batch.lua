-- Make a batch known, once; a batch that is known already stays as it is.
-- KEYS    batches, batch
-- ARGV    1: id; 2: created_at; then field, value, ...
-- return  1 when it is new, else 0

if redis.call('EXISTS', KEYS[2]) == 1 then
  return 0
end
redis.call('HSET', KEYS[2], unpack(ARGV, 3))
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
return 1
