-- Shared by the scripts: Redis' clock, exact stamps, hashes as tables.

local function now_s()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end

-- Lua would print a stamp with 14 digits and lose its fraction.
local function stamp(seconds)
  return string.format('%.6f', seconds)
end

local function hash(key)
  local flat = redis.call('HGETALL', key)
  local fields = {}
  for i = 1, #flat, 2 do
    fields[flat[i]] = flat[i + 1]
  end
  return fields
end

-- What answers showed is about the limit that they were seen at.
local function drop_evidence(limit_key)
  redis.call('HDEL', limit_key, 'answers', 'answer_tokens', 'answer_ms', 'answer_leases')
end

-- The tokens of a lease are the last part of its id.
local function lease_tokens(lease)
  return tonumber(string.match(lease, '|(%d+)$') or '0')
end

local function drop_expired(leases_key, grants_key, now)
  local expired = redis.call('ZRANGEBYSCORE', leases_key, '-inf', stamp(now))
  for _, lease in ipairs(expired) do
    redis.call('ZREM', leases_key, lease)
    redis.call('ZREM', grants_key, lease)
  end
end
