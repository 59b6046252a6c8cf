-- Note that a worker has no /v1/loads, if the incarnation that was probed still stands and is ready.
-- KEYS    worker, memo
-- ARGV    1: incarnation; 2: reason; 3: seconds to live
-- return  1 when written, else 0
-- include common

local life = redis.call('HMGET', KEYS[1], 'incarnation', 'state')
if life[1] ~= ARGV[1] or life[2] ~= 'ready' then
  return 0
end
local until_s = now_s() + tonumber(ARGV[3])
redis.call('HSET', KEYS[2], 'reason', ARGV[2], 'incarnation', ARGV[1], 'until', stamp(until_s))
redis.call('PEXPIREAT', KEYS[2], string.format('%d', math.ceil(until_s * 1000)))
return 1
