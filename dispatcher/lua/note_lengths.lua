-- Add lengths of answers to their models' running means. Repeating it counts them twice, which a mean of many
-- hardly shows.
-- KEYS    answers
-- ARGV    1: how many answers a mean remembers; 2: most models; 3: lifetime (s);
--         then for each model: its name, answers, the sum of their tokens
-- return  models written

local remembered, most_models = tonumber(ARGV[1]), tonumber(ARGV[2])
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
               string.format('mean=%.2f answers=%d', (mean * weight + tokens) / all, all))
    written = written + 1
  end
end
if written > 0 then
  redis.call('EXPIRE', KEYS[1], ARGV[3])
end
return written
