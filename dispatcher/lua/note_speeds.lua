-- Say how fast workers write, as seen by one dispatcher: for those who have not seen them at work yet.
-- A few others that were told long ago go each time: of workers that are gone nobody tells any more.
-- KEYS    speeds
-- ARGV    1: seconds that it is kept; then worker, tokens per second and request, ...
-- return  how many workers were written
-- include common

local now = now_s()
local at = stamp(now)
for i = 2, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], 'rate=' .. ARGV[i + 1] .. ' at=' .. at)
end
local few = redis.call('HRANDFIELD', KEYS[1], 8, 'WITHVALUES')
for i = 1, #few, 2 do
  local told = tonumber(string.match(few[i + 1], ' at=(%S+)$') or '0')
  if not told or now - told >= tonumber(ARGV[1]) then
    redis.call('HDEL', KEYS[1], few[i])
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return (#ARGV - 1) / 2
