-- Add lengths of answers to their models' running means. Repeating it counts them twice, which a mean of many
-- hardly shows. Where there is no room for new models, those that were answered for longest ago make some.
-- KEYS    answers
-- ARGV    1: how many answers a mean remembers; 2: most models; 3: lifetime (s);
--         then for each model: its name, answers, the sum of their tokens
-- return  models written
-- include common

local remembered, most_models, lifetime_s = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_s()

local function make_room(named, wanted)
  local others, all = {}, redis.call('HGETALL', KEYS[1])
  for i = 1, #all, 2 do
    if not named[all[i]] then
      local at = tonumber(string.match(all[i + 1], ' at=(%S+)') or '0') or 0
      others[#others + 1] = {name = all[i], at = at}
    end
  end
  table.sort(others, function(one, other) return one.at < other.at end)
  for i, other in ipairs(others) do
    if i > wanted and other.at + lifetime_s > now then
      break
    end
    redis.call('HDEL', KEYS[1], other.name)
  end
end

local named, missing = {}, 0
for i = 4, #ARGV, 3 do
  named[ARGV[i]] = true
  missing = missing + 1 - redis.call('HEXISTS', KEYS[1], ARGV[i])
end
local wanted = redis.call('HLEN', KEYS[1]) + missing - most_models
if wanted > 0 and missing > 0 then
  make_room(named, wanted)
end

local written = 0
for i = 4, #ARGV, 3 do
  local count, tokens = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local standing = redis.call('HGET', KEYS[1], ARGV[i])
  if standing or redis.call('HLEN', KEYS[1]) < most_models then
    local mean = tonumber(string.match(standing or '', 'mean=([%d.]+)') or '0')
    local weight = math.min(tonumber(string.match(standing or '', 'answers=(%d+)') or '0'), remembered)
    -- Older answers lose weight as new ones come, so that the mean follows what is asked lately.
    weight = math.min(weight, math.max(0, remembered - count))
    local all = weight + count
    redis.call('HSET', KEYS[1], ARGV[i],
               string.format('mean=%.2f answers=%d at=%s', (mean * weight + tokens) / all, all, stamp(now)))
    written = written + 1
  end
end
if written > 0 then
  redis.call('EXPIRE', KEYS[1], ARGV[3])
end
return written
