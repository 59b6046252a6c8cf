-- The breaker's transition table inside Redis; the twin of workers/breaker.py, held together by tests.
-- A breaker is a table with the fields of Breaker; policy is the table of BreakerPolicy.

local BUCKET_S = 5

local function breaker_load(key)
  local fields = hash(key)
  local window = {}
  for bucket, successes, failures in string.gmatch(fields.window or '', '(%d+):(%d+):(%d+)') do
    window[#window + 1] = {tonumber(bucket), tonumber(successes), tonumber(failures)}
  end
  return {
    state = fields.state or 'closed', epoch = tonumber(fields.epoch or '0'), trips = tonumber(fields.trips or '0'),
    open_until = tonumber(fields.open_until or '0'), failures = tonumber(fields.failures or '0'),
    reason = fields.reason or '', trial = fields.trial or '', trial_until = tonumber(fields.trial_until or '0'),
    healthy_since = tonumber(fields.healthy_since or '0'), window = window,
  }
end

local function breaker_save(key, breaker)
  local window = {}
  for _, entry in ipairs(breaker.window) do
    window[#window + 1] = string.format('%d:%d:%d', entry[1], entry[2], entry[3])
  end
  redis.call('HSET', key,
    'state', breaker.state, 'epoch', string.format('%d', breaker.epoch),
    'trips', string.format('%d', breaker.trips), 'open_until', stamp(breaker.open_until),
    'failures', string.format('%d', breaker.failures), 'reason', breaker.reason, 'trial', breaker.trial,
    'trial_until', stamp(breaker.trial_until), 'healthy_since', stamp(breaker.healthy_since),
    'window', table.concat(window, ' '))
end

local function breaker_blocked_until(breaker)
  if breaker.state == 'open' then
    return breaker.open_until
  end
  return breaker.trial_until
end

-- Returns admitted, trial, until.
local function breaker_admit(breaker, attempt, now, policy)
  if breaker.state == 'closed' then
    return true, false, 0
  end
  local blocked_until = breaker_blocked_until(breaker)
  if now < blocked_until then
    return false, false, blocked_until
  end
  breaker.state = 'half_open'
  breaker.trial = attempt
  breaker.trial_until = now + policy.trial_s
  return true, true, 0
end

local function breaker_reset_to(breaker, fields)
  for name, value in pairs({state = 'closed', open_until = 0, failures = 0, reason = '', trial = '',
                            trial_until = 0, healthy_since = 0}) do
    breaker[name] = value
  end
  breaker.window = {}
  for name, value in pairs(fields) do
    breaker[name] = value
  end
end

local function breaker_open(breaker, now, policy, reason, jitter)
  local trips = breaker.trips
  if breaker.state == 'closed' then
    trips = math.max(0, trips - math.floor((now - breaker.healthy_since) / policy.decay_s))
  end
  trips = trips + 1
  local pause = math.min(policy.base_s * 2 ^ (trips - 1), policy.cap_s) * (1 + jitter)
  breaker_reset_to(breaker, {state = 'open', epoch = breaker.epoch + 1, trips = trips,
                             open_until = math.max(breaker.open_until, now + pause), reason = reason})
end

local function breaker_count(breaker, now, policy, failed)
  local bucket = math.floor(now / BUCKET_S)
  local oldest = math.floor((now - policy.window_s) / BUCKET_S) + 1
  local kept = {}
  for _, entry in ipairs(breaker.window) do
    if entry[1] >= oldest then
      kept[#kept + 1] = entry
    end
  end
  if #kept == 0 or kept[#kept][1] ~= bucket then
    kept[#kept + 1] = {bucket, 0, 0}
  end
  local entry = kept[#kept]
  if failed then
    entry[3] = entry[3] + 1
    breaker.failures = breaker.failures + 1
  else
    entry[2] = entry[2] + 1
    breaker.failures = 0
  end
  breaker.window = kept
end

local function breaker_rate_reached(breaker, policy)
  local failures, total = 0, 0
  for _, entry in ipairs(breaker.window) do
    failures = failures + entry[3]
    total = total + entry[2] + entry[3]
  end
  return total >= policy.rate_minimum and failures >= policy.failure_rate * total
end

-- Returns true when the report has just healed the breaker.
local function breaker_report(breaker, attempt, epoch, verdict, now, policy, reason, jitter)
  if epoch ~= breaker.epoch or breaker.state == 'open' then
    return false
  end
  if breaker.state == 'half_open' then
    if attempt ~= breaker.trial then
      return false
    end
    if verdict == 'success' then
      breaker_reset_to(breaker, {epoch = breaker.epoch + 1, healthy_since = now})
      return true
    end
    if verdict == 'failure' then
      breaker_open(breaker, now, policy, reason, jitter)
    else
      breaker.trial = ''
      breaker.trial_until = 0
    end
    return false
  end
  if verdict == 'neutral' then
    return false
  end
  local failed = verdict == 'failure'
  breaker_count(breaker, now, policy, failed)
  if failed and (breaker.failures >= policy.failure_threshold or breaker_rate_reached(breaker, policy)) then
    breaker_open(breaker, now, policy, reason, jitter)
  end
  return false
end
