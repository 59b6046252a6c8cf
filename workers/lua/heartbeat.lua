-- Mark one of several equal services live, and say who else is.
-- KEYS    1: the set of heartbeats
-- ARGV    1: name; 2: seconds after which a silent one is gone
-- return  names of the live ones, in order of name
-- include common

local now = now_s()
redis.call('ZADD', KEYS[1], stamp(now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', stamp(now - tonumber(ARGV[2])))
-- Later than now: Redis' clock went back. Who lives says so again; who does not would stay for long.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. stamp(now), '+inf')
local names = redis.call('ZRANGE', KEYS[1], 0, -1)
table.sort(names)
return names
