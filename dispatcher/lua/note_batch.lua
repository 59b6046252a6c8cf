-- Write fields of a batch that no move depends on; a batch that is gone is not brought back by them.
-- KEYS    batch
-- ARGV    1: field; 2: value; ...
-- return  1 when written, 0 when there is no such batch, or nothing to write

if redis.call('EXISTS', KEYS[1]) == 0 or not ARGV[1] then
  return 0
end
redis.call('HSET', KEYS[1], unpack(ARGV))
return 1
