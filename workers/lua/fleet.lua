-- One look at the whole fleet.
-- KEYS    1: workers:generation; then per worker seven: worker, load, limit, breaker, deferral, leases, grants
-- ARGV    1: the generation that the list of workers was read at
-- return  JSON [now, generation], and when the generation is still the same one entry for each worker:
--         [worker, load, limit, breaker, deferral (flat hashes), leases, leases since the sample, their tokens]
--         One text is read 30 times faster by our clients than as many values; an empty hash is {}.
-- include common

local now = now_s()
local generation = redis.call('GET', KEYS[1]) or '0'
local answer = {stamp(now), generation}
if generation ~= ARGV[1] then
  return cjson.encode(answer)
end
for base = 2, #KEYS, 7 do
  local load = redis.call('HGETALL', KEYS[base + 1])
  local sampled_at = '-inf'
  for i = 1, #load, 2 do
    local at = load[i] == 'sampled_at' and tonumber(load[i + 1])
    if at and at == at then -- what is no number would end the look at all the others, too
      sampled_at = '(' .. string.format('%.17g', at)
    end
  end
  local live = '(' .. stamp(now)
  local since = redis.call('ZRANGEBYSCORE', KEYS[base + 6], sampled_at, '+inf')
  local tokens = 0
  for _, lease in ipairs(since) do
    tokens = tokens + lease_tokens(lease)
  end
  answer[#answer + 1] = {
    redis.call('HGETALL', KEYS[base]), load, redis.call('HGETALL', KEYS[base + 2]),
    redis.call('HGETALL', KEYS[base + 3]), redis.call('HGETALL', KEYS[base + 4]),
    redis.call('ZCOUNT', KEYS[base + 5], live, '+inf'), #since, string.format('%d', tokens),
  }
end
return cjson.encode(answer)
