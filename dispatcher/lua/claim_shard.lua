-- Claim a shard: the next claim number fences every older holder. A shard that is done stays done.
-- KEYS    batch, shards
-- ARGV    1: shard; 2: who claims
-- return  [claim, status of the batch]; claim 0 when the batch is not in progress, or not there
-- include common

local status = redis.call('HGET', KEYS[1], 'status') or ''
if status ~= 'in_progress' then
  return {0, status}
end
local standing = redis.call('HGET', KEYS[2], ARGV[1]) or ''
local claim = tonumber(string.match(standing, 'claim=(%d+)') or '0') + 1
local counted = string.match(standing, 'completed=.*$') or 'completed=0 failed=0 prompt=0 completion=0 cost=0'
local state = string.match(standing, 'state=(%w+)') == 'done' and 'done' or 'running'
redis.call('HSET', KEYS[2], ARGV[1], string.format('claim=%d state=%s by=%s %s', claim, state, ARGV[2], counted))
return {claim, status}
