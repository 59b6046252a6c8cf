-- Count answers of workers that do not tell how busy they are, beside the limits that they are about.
-- KEYS    per worker: limit
-- ARGV    per worker five: since when the limit stands, answers, their tokens, their milliseconds, the leases
--         that the worker had when each came
-- return  how many workers it was counted for: what is about an earlier limit says nothing any more
-- include common

local counted = 0
for number, key in ipairs(KEYS) do
  local base = (number - 1) * 5
  if tonumber(redis.call('HGET', key, 'since') or '-1') == tonumber(ARGV[base + 1]) then
    redis.call('HINCRBY', key, 'answers', ARGV[base + 2])
    redis.call('HINCRBY', key, 'answer_tokens', ARGV[base + 3])
    redis.call('HINCRBY', key, 'answer_ms', ARGV[base + 4])
    redis.call('HINCRBY', key, 'answer_leases', ARGV[base + 5])
    counted = counted + 1
  end
end
return counted
