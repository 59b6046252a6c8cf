-- Take the next job off one of RQ's queues into its intermediate queue: the first that is no shard, else the
-- first shard of the batch whose turn it is. That is the batch with the smallest time; of several the one with
-- the nearest deadline, then the one that came first. A shard taken moves its batch's time on by the shard's
-- planned cost over the batch's share; a batch that comes starts at the smallest time of those that are there
-- [start-time fair queueing, Goyal, Vin and Cheng 1996]. The list is RQ's, and anybody may change it: what is
-- remembered here only saves reading all of it, and may be deleted at any moment.
-- KEYS    queue, intermediate, memory, turns, express
-- ARGV    1: longest time from one look through the whole queue to the next (s);
--         then batch, terms, ...: what was asked for by an earlier answer
-- return  [job], taken; or ['', batch, ...]: tell their terms and ask again; or [], the queue is empty
-- include common

local QUEUE, INTERMEDIATE, MEMORY, TURNS, EXPRESS = unpack(KEYS)
local BLOCK, NEAR, MOST_AT_THE_FRONT, MOST_TIED = 512, 8, 1024, 32

local function number_of(text, name)
  return tonumber(string.match(text, '%f[%w]' .. name .. '=(%S+)') or '')
end

local function with(text, name, value)
  local bare = string.gsub(text, '%f[%w]' .. name .. '=%S+ ?', '')
  return value and string.format('%s=%s %s', name, value, bare) or bare
end

-- The batch and the number of a shard's job; nil: it is another job.
local function shard_of(job)
  return string.match(job, '^(batch_%w+)%-(%d+)$')
end

local function known(batch)
  return redis.call('HGET', MEMORY, batch) or ''
end

local function first_turn()
  return redis.call('ZRANGE', TURNS, 0, 0, 'WITHSCORES')
end

-- A batch has jobs here: if it had none, its time is the smallest of all, unless its own is later.
local function come(batch)
  local text = known(batch)
  local time = redis.call('ZSCORE', TURNS, batch)
  if time and number_of(text, 'order') then
    return
  end
  if not time then
    local now = tonumber(first_turn()[2] or redis.call('HGET', MEMORY, 'clock') or '0')
    time = math.max(now, number_of(text, 'time') or now)
    redis.call('ZADD', TURNS, string.format('%.17g', time), batch)
  end
  text = with(with(text, 'time'), 'order', redis.call('HINCRBY', MEMORY, 'orders', 1))
  redis.call('HSET', MEMORY, batch, text)
end

-- No job of it is left here. Its time is kept until the others' is as late: leaving shall gain nothing.
local function leave(batch)
  local time = redis.call('ZSCORE', TURNS, batch)
  redis.call('ZREM', TURNS, batch)
  if tonumber(time) > tonumber(redis.call('HGET', MEMORY, 'clock') or '0') then
    redis.call('HSET', MEMORY, batch, with(with(known(batch), 'next'), 'time', time))
  else
    redis.call('HDEL', MEMORY, batch)
  end
end

-- Forget batches that left, once they would gain nothing by coming back.
local function forget_the_passed()
  local clock = tonumber(redis.call('HGET', MEMORY, 'clock') or '0')
  for field, text in pairs(hash(MEMORY)) do
    local time = number_of(text, 'time')
    if time and time <= clock then
      redis.call('HDEL', MEMORY, field)
    end
  end
end

-- Batches and other jobs among jobs that stand behind all that is known, in their order; `there` collects the
-- batches.
local function note(jobs, there)
  local prefix
  for _, job in ipairs(jobs) do
    -- Neighbours are mostly of one batch, and comparing is cheaper than matching.
    local digit = prefix and string.sub(job, 1, #prefix) == prefix and string.byte(job, #prefix + 1)
    if not digit or digit < 48 or digit > 57 then
      local batch, shard = shard_of(job)
      prefix = batch and batch .. '-'
      if not batch then
        redis.call('RPUSH', EXPRESS, job)
      elseif not there[batch] then
        there[batch] = shard
        come(batch)
      end
    end
  end
end

local function look_through_all(now)
  redis.call('DEL', EXPRESS)
  local there = {}
  for start = 0, redis.call('LLEN', QUEUE) - 1, BLOCK do
    note(redis.call('LRANGE', QUEUE, start, start + BLOCK - 1), there)
  end
  for _, batch in ipairs(redis.call('ZRANGE', TURNS, 0, -1)) do
    if there[batch] then
      redis.call('HSET', MEMORY, batch, with(known(batch), 'next', there[batch]))
    else
      leave(batch)
    end
  end
  forget_the_passed()
  redis.call('HSET', MEMORY, 'looked_at', stamp(now))
end

-- What was put before the job that was first, in the order of the queue; nil: that job is not found.
local function new_at_the_front(old)
  local found = {}
  for _, job in ipairs(redis.call('LRANGE', QUEUE, 0, MOST_AT_THE_FRONT - 1)) do
    if job == old then
      return found
    end
    found[#found + 1] = job
  end
end

-- What was put behind the job that was last, in the order of the queue; nil: that job is not found.
local function new_at_the_back(old)
  local found = {}
  for stop = -1, -redis.call('LLEN', QUEUE), -BLOCK do
    local block = redis.call('LRANGE', QUEUE, stop - BLOCK + 1, stop)
    for i = #block, 1, -1 do
      if block[i] == old then
        local ordered = {}
        for j = #found, 1, -1 do
          ordered[#ordered + 1] = found[j]
        end
        return ordered
      end
      found[#found + 1] = block[i]
    end
  end
end

local function note_at_the_front(jobs)
  for i = #jobs, 1, -1 do
    local batch, shard = shard_of(jobs[i])
    if batch then
      come(batch)
      redis.call('HSET', MEMORY, batch, with(known(batch), 'next', shard))
    else
      redis.call('LPUSH', EXPRESS, jobs[i])
    end
  end
end

-- Learn what was put into the queue since the last job was taken off: at its ends, where RQ puts jobs.
local function look(length, longest_s)
  local head, tail = redis.call('LINDEX', QUEUE, 0), redis.call('LINDEX', QUEUE, -1)
  local seen = redis.call('HMGET', MEMORY, 'head', 'tail', 'length', 'looked_at')
  local now = now_s()
  local front, back
  if seen[4] and now - tonumber(seen[4]) < longest_s then
    front = head == seen[1] and {} or new_at_the_front(seen[1])
    back = tail == seen[2] and {} or new_at_the_back(seen[2])
  end
  if not front or not back or tonumber(seen[3]) + #front + #back < length then
    look_through_all(now)
  else
    note_at_the_front(front)
    note(back, {})
  end
end

local function take(job)
  return redis.call('LREM', QUEUE, 1, job) == 1 and redis.call('RPUSH', INTERMEDIATE, job) and job
end

local function take_express()
  local job = redis.call('LPOP', EXPRESS)
  while job do
    if take(job) then
      local ended = string.match(job, '^(batch_%w+)%-finalise$')
      if ended then
        redis.call('ZREM', TURNS, ended)
        redis.call('HDEL', MEMORY, ended)
      end
      return job
    end
    job = redis.call('LPOP', EXPRESS)
  end
end

-- Where a batch's first job stands from `start` on, and its shard; nil: nowhere, or not before `stop`.
local function find(batch, start, stop)
  local prefix = batch .. '-'
  for first = start, stop, BLOCK do
    for i, job in ipairs(redis.call('LRANGE', QUEUE, first, math.min(first + BLOCK - 1, stop))) do
      local _, shard
      if string.sub(job, 1, #prefix) == prefix then
        _, shard = shard_of(job)
      end
      if shard then
        return first + i - 1, shard
      end
    end
  end
end

-- The first job of a batch, taken; its shard, and the one after it when that stands near.
local function take_of(batch, text)
  local shard = string.match(text, '%f[%w]next=(%d+)')
  local place = shard and redis.call('LPOS', QUEUE, batch .. '-' .. shard)
  if not place then
    place, shard = find(batch, 0, redis.call('LLEN', QUEUE))
  end
  if place then
    local job = take(batch .. '-' .. shard)
    local _, after = find(batch, place, place + NEAR)
    return job, tonumber(shard), after
  end
end

-- What a shard of these terms is charged: costs are given as `first shard:mean cost`, from there on.
local function cost_of(text, shard)
  local cost = 1
  for first, mean in string.gmatch(string.match(text, 'costs=(%S+)') or '', '(%d+):([%d.]+)') do
    if tonumber(first) > shard then
      break
    end
    cost = tonumber(mean)
  end
  return math.max(cost, 1) / (number_of(text, 'share') or 1)
end

-- The batch whose turn it is, or those whose terms have to be known to tell.
local function whose_turn()
  local first = first_turn()
  if not first[1] then
    return nil, {}
  end
  local best, best_text, unknown = nil, nil, {}
  for _, batch in ipairs(redis.call('ZRANGEBYSCORE', TURNS, first[2], first[2], 'LIMIT', 0, MOST_TIED)) do
    local text = known(batch)
    local expires, order = number_of(text, 'expires'), number_of(text, 'order')
    if not expires then
      unknown[#unknown + 1] = batch
    elseif not best or expires < number_of(best_text, 'expires')
        or (expires == number_of(best_text, 'expires') and order < number_of(best_text, 'order')) then
      best, best_text = batch, text
    end
  end
  return best, unknown
end

-- A shard of the batch whose turn it is, taken; or the batches whose terms have to be told.
local function take_by_turn()
  while true do
    local batch, unknown = whose_turn()
    if #unknown > 0 or not batch then
      return nil, unknown
    end
    local text, time = known(batch), redis.call('ZSCORE', TURNS, batch)
    local job, shard, after = take_of(batch, text)
    if job then
      redis.call('HSET', MEMORY, 'clock', time, batch, with(text, 'next', after))
      -- What is late is not sent any more: it only has to be answered, and that costs nobody anything.
      local late = (number_of(text, 'expires') or math.huge) <= now_s()
      local cost = late and 0 or cost_of(text, shard)
      redis.call('ZADD', TURNS, string.format('%.17g', tonumber(time) + cost), batch)
      return job, {}
    end
    leave(batch)
  end
end

local function remember_ends()
  local length = redis.call('LLEN', QUEUE)
  if length > 0 then
    redis.call('HSET', MEMORY, 'length', length, 'head', redis.call('LINDEX', QUEUE, 0),
               'tail', redis.call('LINDEX', QUEUE, -1))
  end
end

local length = redis.call('LLEN', QUEUE)
if length == 0 then
  redis.call('DEL', MEMORY, TURNS, EXPRESS)
  return {}
end
for i = 2, #ARGV, 2 do
  if redis.call('ZSCORE', TURNS, ARGV[i]) then
    redis.call('HSET', MEMORY, ARGV[i], known(ARGV[i]) .. ' ' .. ARGV[i + 1])
  end
end
look(length, tonumber(ARGV[1]))
local job, unknown = take_express(), {}
if not job then
  job, unknown = take_by_turn()
end
remember_ends()
if job then
  return {job}
end
if #unknown > 0 then
  return {'', unpack(unknown)}
end
-- Somebody changed the queue in a way that nobody does: begin anew.
redis.call('DEL', MEMORY, TURNS, EXPRESS)
return {''}
