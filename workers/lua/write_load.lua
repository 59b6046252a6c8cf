-- Replace a worker's load by a newer one.
-- KEYS    worker, load
-- ARGV    1: incarnation; 2: sampled_at; then field, value, ...
-- return  1 when written, 0 when another incarnation or a newer load stands

if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then
  return 0
end
if tonumber(redis.call('HGET', KEYS[2], 'sampled_at') or '0') > tonumber(ARGV[2]) then
  return 0
end
redis.call('DEL', KEYS[2])
redis.call('HSET', KEYS[2], unpack(ARGV, 3))
return 1
