-- Forget a worker.
-- KEYS    workers, workers:generation, then every key of the worker
-- ARGV    1: id; 2: incarnation that must stand, or "any"
-- return  1 when it was there, else 0

if ARGV[2] ~= 'any' and redis.call('HGET', KEYS[3], 'incarnation') ~= ARGV[2] then
  return 0
end
if redis.call('SREM', KEYS[1], ARGV[1]) == 0 then
  return 0
end
for i = 3, #KEYS do
  redis.call('DEL', KEYS[i])
end
redis.call('INCR', KEYS[2])
return 1
