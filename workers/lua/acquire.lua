-- Take a lease for each of several attempts, each on the first of its candidates that admits it.
-- An attempt that holds a lease already keeps it, for another term: its call was sent before, the answer lost.
-- KEYS    per worker six: worker, breaker, deferral, limit, leases, grants
-- ARGV    1: JSON {ttl_s, default_limit, policy, asks: [{id, candidates: [worker number from 1, ...]}]}
-- return  JSON [{worker, epoch, trial} | {refused: [[worker number, why, ask again at], ...]}], one for each ask
-- include common
-- include breaker

local call = cjson.decode(ARGV[1])
local now = now_s()
local states = {}

local function keys_of(number)
  local base = (number - 1) * 6
  return {worker = KEYS[base + 1], breaker = KEYS[base + 2], deferral = KEYS[base + 3],
          limit = KEYS[base + 4], leases = KEYS[base + 5], grants = KEYS[base + 6]}
end

local function state_of(number)
  local state = states[number]
  if state then
    return state
  end
  local keys = keys_of(number)
  drop_expired(keys.leases, keys.grants, now)
  state = {
    keys = keys,
    life = redis.call('HGET', keys.worker, 'state'),
    breaker = breaker_load(keys.breaker),
    deferred_until = tonumber(redis.call('HGET', keys.deferral, 'until') or '0'),
    limit = tonumber(redis.call('HGET', keys.limit, 'value') or call.default_limit),
    leases = redis.call('ZCARD', keys.leases),
    touched = false,
  }
  states[number] = state
  return state
end

local function write_lease(state, attempt)
  redis.call('ZADD', state.keys.leases, stamp(now + call.ttl_s), attempt)
  redis.call('ZADD', state.keys.grants, stamp(now), attempt)
end

-- Returns nil and the grant, or why not and when to ask again.
local function try(state, attempt)
  if state.life ~= 'ready' then
    return 'not ready', 0
  end
  if state.deferred_until > now then
    return 'deferred', state.deferred_until
  end
  if state.leases >= state.limit then
    return 'full', 0
  end
  local before = state.breaker.state
  local epoch = state.breaker.epoch
  local admitted, trial, again_at = breaker_admit(state.breaker, attempt, now, call.policy)
  if not admitted then
    return 'breaker ' .. before, again_at
  end
  state.touched = state.touched or trial
  state.leases = state.leases + 1
  write_lease(state, attempt)
  return nil, {epoch = epoch, trial = trial}
end

-- Where attempts hold leases already, by id. One look at each worker: leases by the hundred cost little so.
local function standing()
  local asked = {}
  for _, ask in ipairs(call.asks) do
    for _, number in ipairs(ask.candidates) do
      local ids = asked[number] or {}
      asked[number] = ids
      ids[#ids + 1] = ask.id
    end
  end
  local held = {}
  for number, ids in pairs(asked) do
    for i, expiry in ipairs(redis.call('ZMSCORE', keys_of(number).leases, unpack(ids))) do
      if expiry and tonumber(expiry) > now then
        held[ids[i]] = number
      end
    end
  end
  return held
end

local function grant_again(number, attempt)
  local state = state_of(number)
  local trial = state.breaker.trial == attempt
  if trial then
    state.breaker.trial_until = now + call.policy.trial_s
    state.touched = true
  end
  write_lease(state, attempt)
  return {worker = number, epoch = state.breaker.epoch, trial = trial}
end

local held = standing()
local answers = {}
for i, ask in ipairs(call.asks) do
  local refused = {}
  local grant = held[ask.id] and grant_again(held[ask.id], ask.id)
  for _, number in ipairs(grant and {} or ask.candidates) do
    local why, what = try(state_of(number), ask.id)
    if not why then
      grant = what
      grant.worker = number
      break
    end
    refused[#refused + 1] = {number, why, stamp(what)}
  end
  answers[i] = grant or {refused = refused}
end
for _, state in pairs(states) do
  if state.touched then
    breaker_save(state.keys.breaker, state.breaker)
  end
end
if #answers == 0 then
  return '[]'
end
return cjson.encode(answers)
