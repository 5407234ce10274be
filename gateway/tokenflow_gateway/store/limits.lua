-- Limits of a fleet: see tenants/limits.py (what they are) and tenants/window.py (slots and debts).
--
-- KEYS: for each subject four keys: requests, tokens, leases of open requests, what is spent of the budget in this
-- period: by each process that spends it, and in all ('total').
-- ARGV[1] is what to do:
--   take     id, tokens, lease seconds, process, and for each subject: limits of requests, tokens, open requests,
--            budget (-1: none), seconds until the budget's period ends; at last the epoch, which the last key has
--   settle   id, change of tokens, slot they were taken in, process, tokens if it may not be known (-1: it is), and for
--            each subject the limit of tokens (-1: none), beyond which they are owed; at last the epoch, which the
--            last key has; the one before it is for the script to remember that this was done
--   restore  id, tokens, slot, lease seconds: an open request that may not be known; what it spends is told by `spent`
--   spent    process, tokens: so much it has spent of one budget, which is the only key here
--   recorded process, tokens, ...: the same, but each at least so much
-- The answer of `take`: the time in microseconds, what lacks room ('' if nothing), the number of its subject,
-- milliseconds until it may have room (-1: never), and for each subject what is used of requests and
-- tokens and the milliseconds until nothing of it is.

local SLOT_US, SLOTS = 500000, 121
local WINDOW_MS, BUDGET_MS = 62000, 40 * 86400000
local OPEN_S, STREAM_RETRY_MS = 3600, 1000

local clock = redis.call('TIME')
local now_us = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local now_slot = math.floor(now_us / SLOT_US)

local function keep(key, total, owed)
  redis.call('PEXPIRE', key, WINDOW_MS * (1 + (owed > 0 and math.ceil(owed / total) or 0)))
end

local function shift(key, slots)
  local had = redis.call('HGETALL', key)
  redis.call('DEL', key)
  for at = 1, #had, 2 do
    local slot = tonumber(had[at])
    redis.call('HSET', key, slot and slot + slots or had[at], had[at + 1])
  end
end

-- What counts: `total` of the slots from `oldest` to `newest`, and what is `owed` beside it.
local function window(key)
  local had = redis.call('HMGET', key, 'oldest', 'newest', 'total', 'owed')
  local oldest, newest, total, owed = tonumber(had[1]), tonumber(had[2]), tonumber(had[3]), tonumber(had[4]) or 0
  local first = now_slot - SLOTS + 1
  if not oldest then
    return { total = 0, owed = 0 }
  end
  if oldest < first and owed > 0 then -- whole minutes in which nobody looked
    local minutes = math.min(math.floor((first - oldest) / SLOTS), math.floor(owed / total))
    if minutes > 0 then
      shift(key, minutes * SLOTS)
      oldest, newest = oldest + minutes * SLOTS, newest + minutes * SLOTS
      owed = owed - minutes * total
      redis.call('HSET', key, 'oldest', oldest, 'newest', newest, 'owed', owed)
      keep(key, total, owed)
    end
  end
  if newest < first and owed == 0 then
    redis.call('DEL', key)
    return { total = 0, owed = 0 }
  end
  if oldest < first then
    local slot = oldest
    while slot < first and slot <= newest do
      local held = redis.call('HGET', key, slot)
      if held then
        local paid = math.min(owed, tonumber(held))
        if paid > 0 then
          newest = slot + SLOTS
          redis.call('HSET', key, newest, paid)
        end
        total, owed = total + paid - tonumber(held), owed - paid
        redis.call('HDEL', key, slot)
      end
      slot = slot + 1
    end
    oldest = first
    redis.call('HSET', key, 'oldest', oldest, 'newest', newest, 'total', total, 'owed', owed)
    keep(key, total, owed)
  end
  return { total = total, owed = owed, oldest = oldest, newest = newest }
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
  keep(key, state.total + amount, state.owed)
end

local function use_more(key, amount, limit)
  local state, within = window(key), amount
  if limit >= 0 then
    within = math.max(0, math.min(amount, limit - state.total - state.owed))
  end
  add(key, within, now_slot)
  if within < amount then
    redis.call('HINCRBY', key, 'owed', amount - within)
    keep(key, state.total + within, state.owed + amount - within)
  end
end

local function use_less(key, amount, slot)
  local state = window(key)
  local less = math.min(tonumber(redis.call('HGET', key, slot) or 0), amount)
  local paid = math.min(state.owed, less)
  if less > 0 then
    redis.call('HINCRBY', key, slot, paid - less)
    redis.call('HINCRBY', key, 'total', paid - less)
  end
  if paid > 0 then
    redis.call('HINCRBY', key, 'owed', 0 - paid) -- `-paid` may be -0, which is no number to Redis
  end
end

local function leaves_in_ms(slot)
  return math.max(0, math.ceil(((slot + SLOTS) * SLOT_US - now_us) / 1000))
end

local function amount_leaves_in_ms(key, state, amount)
  local minutes = math.floor((amount - 1) / state.total)
  local left = amount - minutes * state.total
  for slot = state.oldest, state.newest do
    left = left - tonumber(redis.call('HGET', key, slot) or 0)
    if left <= 0 then
      return leaves_in_ms(slot + minutes * SLOTS)
    end
  end
  return leaves_in_ms(state.newest + minutes * SLOTS)
end

local function empty_in_ms(key, state)
  if state.owed > 0 then
    return amount_leaves_in_ms(key, state, state.total + state.owed)
  end
  return state.newest and leaves_in_ms(state.newest) or 0
end

local function room_in_ms(key, state, amount, limit)
  if amount > limit then
    return -1
  end
  local excess = state.total + state.owed + amount - limit
  return excess > 0 and amount_leaves_in_ms(key, state, excess) or 0
end

local function charge(key, process, amount)
  redis.call('HINCRBY', key, process, amount)
  redis.call('HINCRBY', key, 'total', amount)
  redis.call('PEXPIRE', key, BUDGET_MS)
end

local function spent_by(key, process)
  return tonumber(redis.call('HGET', key, process) or 0)
end

local function has_forgotten()
  return redis.call('GET', KEYS[#KEYS]) ~= ARGV[#ARGV]
end

local function forgotten()
  return redis.error_reply('FORGOTTEN this is not the Redis that it was')
end

local function take(id, tokens, lease_s, process)
  if has_forgotten() then
    return forgotten()
  end
  local kind, whose, wait_ms, seen = '', 0, 0, {}
  local function lacks(what, subject, for_ms)
    if for_ms ~= 0 and wait_ms ~= -1 and (for_ms == -1 or for_ms > wait_ms) then
      kind, whose, wait_ms = what, subject, for_ms
    end
  end
  for subject = 1, math.floor(#KEYS / 4) do
    local key, arg = (subject - 1) * 4, 5 + (subject - 1) * 5
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
    if most[4] >= 0 and spent_by(KEYS[key + 4], 'total') + tokens > most[4] then
      lacks('budget', subject, math.ceil(tonumber(ARGV[arg + 5]) * 1000))
    end
  end
  local answer = { string.format('%.0f', now_us), kind, whose, wait_ms }
  for subject = 1, math.floor(#KEYS / 4) do
    local key, requests, used = (subject - 1) * 4, seen[subject][1], seen[subject][2]
    if kind == '' then
      add(KEYS[key + 1], 1, now_slot)
      add(KEYS[key + 2], tokens, now_slot)
      requests.total, requests.newest = requests.total + 1, now_slot
      used.total, used.newest = used.total + tokens, now_slot
      redis.call('ZADD', KEYS[key + 3], now_us / 1000000 + lease_s, id)
      redis.call('EXPIRE', KEYS[key + 3], OPEN_S)
      charge(KEYS[key + 4], process, tokens)
    end
    for _, value in ipairs({ requests.total, empty_in_ms(KEYS[key + 1], requests), used.total + used.owed,
      empty_in_ms(KEYS[key + 2], used) }) do
      answer[#answer + 1] = value
    end
  end
  return answer
end

local function restore(id, tokens, slot, lease_s)
  slot = math.min(slot, now_slot)
  for key = 0, #KEYS - 4, 4 do
    if not redis.call('ZSCORE', KEYS[key + 3], id) then -- else it was counted, and the answer got lost
      add(KEYS[key + 1], 1, slot)
      add(KEYS[key + 2], tokens, slot)
    end
    redis.call('ZADD', KEYS[key + 3], now_us / 1000000 + lease_s, id)
    redis.call('EXPIRE', KEYS[key + 3], OPEN_S)
  end
  return 1
end

local function settle(id, change, slot, process, tokens)
  if has_forgotten() then
    return forgotten()
  end
  local adds = change > 0 or tokens >= 0
  local again = adds and not redis.call('SET', KEYS[#KEYS - 1], 1, 'NX', 'EX', OPEN_S) -- the answer got lost
  if tokens >= 0 and not again then
    restore(id, tokens, slot, 0)
  end
  for key = 0, #KEYS - 4, 4 do
    local was_open = redis.call('ZREM', KEYS[key + 3], id) == 1
    if change > 0 and not again then
      use_more(KEYS[key + 2], change, tonumber(ARGV[7 + key / 4]))
      charge(KEYS[key + 4], process, change)
    elseif change < 0 and was_open then -- nothing is given back twice
      charge(KEYS[key + 4], process, change)
      use_less(KEYS[key + 2], -change, slot)
    end
  end
  return 1
end

local function spent(process, tokens)
  charge(KEYS[1], process, tokens - spent_by(KEYS[1], process))
end

local function recorded()
  for at = 2, #ARGV, 2 do
    local process = ARGV[at]
    spent(process, math.max(tonumber(ARGV[at + 1]), spent_by(KEYS[1], process)))
  end
end

if ARGV[1] == 'take' then
  return take(ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5])
elseif ARGV[1] == 'settle' then
  return settle(ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6]))
elseif ARGV[1] == 'restore' then
  return restore(ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]))
elseif ARGV[1] == 'spent' then
  return spent(ARGV[2], tonumber(ARGV[3]))
end
return recorded()
