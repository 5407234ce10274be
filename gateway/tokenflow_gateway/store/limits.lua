-- Limits of a fleet: see tenants/limits.py (what they are) and tenants/window.py (slots).
--
-- KEYS: for each subject four keys: requests, tokens, leases of open requests, budget of this period.
-- ARGV[1] is what to do:
--   take     id, tokens, lease seconds, and for each subject: limits of requests, tokens, open requests, budget
--            (-1: none), seconds until the budget's period ends; at last the epoch, which the last key has
--   settle   id, change of tokens, slot they were taken in
--   restore  id, tokens, slot, lease seconds (0: has ended), 1 to count the budget too
--   spend    tokens; here KEYS are budgets alone
-- The answer of `take`: the time in microseconds, what lacks room ('' if nothing), the number of its subject,
-- milliseconds until it may have room (-1: never), and for each subject what is used of requests and
-- tokens and the milliseconds until nothing of it is.

local SLOT_US, SLOTS = 500000, 121
local WINDOW_MS, BUDGET_MS = 62000, 40 * 86400000
local STREAM_RETRY_MS = 1000

local clock = redis.call('TIME')
local now_us = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local now_slot = math.floor(now_us / SLOT_US)

local function window(key)
  local had = redis.call('HMGET', key, 'oldest', 'newest', 'total')
  local oldest, newest, total = tonumber(had[1]), tonumber(had[2]), tonumber(had[3])
  local first = now_slot - SLOTS + 1
  if not oldest then
    return { total = 0 }
  end
  if newest < first then
    redis.call('DEL', key)
    return { total = 0 }
  end
  if oldest < first then
    for slot = oldest, first - 1 do
      local held = redis.call('HGET', key, slot)
      if held then
        total = total - tonumber(held)
        redis.call('HDEL', key, slot)
      end
    end
    redis.call('HSET', key, 'oldest', first, 'total', total)
    oldest = first
  end
  return { total = total, oldest = oldest, newest = newest }
end

local function add(key, amount, at_slot)
  local state = window(key)
  if at_slot < now_slot - SLOTS + 1 then
    return
  end
  local oldest, newest = state.oldest or at_slot, state.newest or at_slot
  redis.call('HINCRBY', key, at_slot, amount)
  redis.call('HSET', key, 'oldest', math.min(oldest, at_slot), 'newest', math.max(newest, at_slot),
    'total', state.total + amount)
  redis.call('PEXPIRE', key, WINDOW_MS)
end

local function leaves_in_ms(slot)
  return math.max(0, math.ceil(((slot + SLOTS) * SLOT_US - now_us) / 1000))
end

local function empty_in_ms(state)
  return state.newest and leaves_in_ms(state.newest) or 0
end

local function room_in_ms(key, state, amount, limit)
  if amount > limit then
    return -1
  end
  local excess = state.total + amount - limit
  if excess <= 0 then
    return 0
  end
  for slot = state.oldest, state.newest do
    excess = excess - tonumber(redis.call('HGET', key, slot) or 0)
    if excess <= 0 then
      return leaves_in_ms(slot)
    end
  end
  return leaves_in_ms(state.newest)
end

local function charge(key, amount)
  if redis.call('INCRBY', key, amount) < 0 then
    redis.call('SET', key, 0)
  end
  redis.call('PEXPIRE', key, BUDGET_MS)
end

local function take(id, tokens, lease_s)
  if redis.call('GET', KEYS[#KEYS]) ~= ARGV[#ARGV] then
    return redis.error_reply('FORGOTTEN this is not the Redis that it was')
  end
  local kind, whose, wait_ms, seen = '', 0, 0, {}
  local function lacks(what, subject, for_ms)
    if for_ms ~= 0 and wait_ms ~= -1 and (for_ms == -1 or for_ms > wait_ms) then
      kind, whose, wait_ms = what, subject, for_ms
    end
  end
  for subject = 1, math.floor(#KEYS / 4) do
    local key, arg = (subject - 1) * 4, 4 + (subject - 1) * 5
    local most = { tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2]), tonumber(ARGV[arg + 3]),
      tonumber(ARGV[arg + 4]) }
    local requests, used = window(KEYS[key + 1]), window(KEYS[key + 2])
    seen[subject] = { requests, used }
    if most[1] >= 0 then
      lacks('requests', subject, room_in_ms(KEYS[key + 1], requests, 1, most[1]))
    end
    if most[2] >= 0 then
      lacks('tokens', subject, room_in_ms(KEYS[key + 2], used, tokens, most[2]))
    end
    redis.call('ZREMRANGEBYSCORE', KEYS[key + 3], '-inf', now_us / 1000000)
    if most[3] >= 0 and redis.call('ZCARD', KEYS[key + 3]) >= most[3] then
      lacks('streams', subject, STREAM_RETRY_MS)
    end
    if most[4] >= 0 and tonumber(redis.call('GET', KEYS[key + 4]) or 0) + tokens > most[4] then
      lacks('budget', subject, math.ceil(tonumber(ARGV[arg + 5]) * 1000))
    end
  end
  local answer = { string.format('%.0f', now_us), kind, whose, wait_ms }
  for subject = 1, math.floor(#KEYS / 4) do
    local key, requests, used = (subject - 1) * 4, seen[subject][1], seen[subject][2]
    local one, some = 0, 0
    if kind == '' then
      one, some = 1, tokens
      add(KEYS[key + 1], 1, now_slot)
      add(KEYS[key + 2], tokens, now_slot)
      requests.newest, used.newest = now_slot, now_slot
      redis.call('ZADD', KEYS[key + 3], now_us / 1000000 + lease_s, id)
      redis.call('EXPIRE', KEYS[key + 3], 3600)
      charge(KEYS[key + 4], tokens)
    end
    for _, value in ipairs({ requests.total + one, empty_in_ms(requests), used.total + some,
      empty_in_ms(used) }) do
      answer[#answer + 1] = value
    end
  end
  return answer
end

local function settle(id, change, slot)
  for key = 0, #KEYS - 4, 4 do
    local was_open = redis.call('ZREM', KEYS[key + 3], id) == 1
    if change > 0 then
      add(KEYS[key + 2], change, now_slot)
      charge(KEYS[key + 4], change)
    elseif change < 0 and was_open then -- nothing is given back twice
      charge(KEYS[key + 4], change)
      window(KEYS[key + 2])
      local less = math.min(tonumber(redis.call('HGET', KEYS[key + 2], slot) or 0), -change)
      if less > 0 then
        redis.call('HINCRBY', KEYS[key + 2], slot, -less)
        redis.call('HINCRBY', KEYS[key + 2], 'total', -less)
      end
    end
  end
  return 1
end

local function restore(id, tokens, slot, lease_s, budget)
  slot = math.min(slot, now_slot)
  for key = 0, #KEYS - 4, 4 do
    add(KEYS[key + 1], 1, slot)
    add(KEYS[key + 2], tokens, slot)
    if lease_s > 0 then
      redis.call('ZADD', KEYS[key + 3], now_us / 1000000 + lease_s, id)
    end
    if budget == 1 then
      charge(KEYS[key + 4], tokens)
    end
  end
  return 1
end

if ARGV[1] == 'take' then
  return take(ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]))
elseif ARGV[1] == 'settle' then
  return settle(ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]))
end
if ARGV[1] == 'spend' then
  return charge(KEYS[1], tonumber(ARGV[2]))
end
return restore(ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]))
