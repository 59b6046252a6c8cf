-- Replace workers' loads by newer ones; each for itself.
-- KEYS    per worker two: worker, load
-- ARGV    1: JSON [[incarnation, sampled_at, [field, value, ...]], ...], texts all of them, one for each worker
-- return  one number for each worker: 1 when written, 0 when another incarnation or a newer load stands
-- include common

local answer = {}
local now = now_s()
for number, given in ipairs(cjson.decode(ARGV[1])) do
  local worker_key, load_key = KEYS[number * 2 - 1], KEYS[number * 2]
  local lives = redis.call('HGET', worker_key, 'incarnation') == given[1]
  -- What is no number, or later than now (Redis' clock went back), would not be overwritten for long.
  local standing = tonumber(redis.call('HGET', load_key, 'sampled_at') or '0')
  local newer = standing and standing < now + 1 and standing > tonumber(given[2])
  if lives and not newer then
    redis.call('DEL', load_key)
    redis.call('HSET', load_key, unpack(given[3]))
    answer[number] = 1
  else
    answer[number] = 0
  end
end
return answer
