-- Write what the monitor found out about a worker, if its incarnation still stands.
-- A draining worker stays draining. Leaving ready drops the memo: the next life may serve what this one did not.
-- KEYS    worker, memo
-- ARGV    1: incarnation; 2: new state; then field, value, ...
-- return  1 when written, 0 when another incarnation stands
-- include common

if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then
  return 0
end
local standing = redis.call('HGET', KEYS[1], 'state')
local state = ARGV[2]
if standing == 'draining' then
  state = 'draining'
end
if standing ~= state then
  redis.call('HSET', KEYS[1], 'state', state, 'since', stamp(now_s()))
end
if state ~= 'ready' then
  redis.call('DEL', KEYS[2])
end
for i = 3, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
return 1
