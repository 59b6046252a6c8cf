-- Say what waits in vain at one dispatcher, and hear what does at the others.
-- KEYS    demand
-- ARGV    1: the dispatcher; 2: its demand, a JSON text without control characters, '' when nothing waits;
--         3: seconds that it holds
-- return  JSON list of the texts of the others that still hold
-- include common

local now = now_s()
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], 'until=' .. stamp(now + tonumber(ARGV[3])) .. ' ' .. ARGV[2])
  redis.call('EXPIRE', KEYS[1], 60)
end
local others = {}
local told = redis.call('HGETALL', KEYS[1])
for i = 1, #told, 2 do
  local holds, text = string.match(told[i + 1], '^until=([%d.]+) (.*)$')
  if holds == nil or tonumber(holds) == nil or tonumber(holds) <= now then
    redis.call('HDEL', KEYS[1], told[i])
  elseif told[i] ~= ARGV[1] then
    others[#others + 1] = text
  end
end
return #others == 0 and '[]' or cjson.encode(others)
