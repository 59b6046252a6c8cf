-- Say how fast workers write, as seen by one dispatcher: for those who have not seen them at work yet.
-- KEYS    speeds
-- ARGV    1: seconds that it is kept; then worker, tokens per second and request, ...
-- return  how many workers were written
-- include common

local at = stamp(now_s())
for i = 2, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], 'rate=' .. ARGV[i + 1] .. ' at=' .. at)
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return (#ARGV - 1) / 2
