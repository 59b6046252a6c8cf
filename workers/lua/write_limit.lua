-- Set a worker's limit, if nobody changed it since it was read.
-- KEYS    worker, limit
-- ARGV    1: incarnation; 2: version that was read; 3: value; 4: reason
-- return  1 when written, 0 when another incarnation or version stands
-- include common

if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then
  return 0
end
if (redis.call('HGET', KEYS[2], 'version') or '0') ~= ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[2], 'value', ARGV[3], 'reason', ARGV[4], 'since', stamp(now_s()))
redis.call('HINCRBY', KEYS[2], 'version', 1)
drop_evidence(KEYS[2])
return 1
