"""The steps of the Redis store, each one script: Redis runs a script whole, by its own clock.

A record is a hash:

    st       r: in flight, e: ended, u: ended and unknown
    fp call fence idem uttl             of the claim; `call` becomes that of the end
    scope                               JSON: [tenant, tool, key]
    holder                              who asked for the claim; gone when it was settled
    lease                               in flight: the instant it lapses unless renewed
    watch                               in flight: somebody in another process waits for it
    end ended exp by                    ended: the end, when, until when, and by which `settle`
    lapsed                              ended because its lease did

Beside the records: `leases`, claims of tools that are not idempotent by lapse, and `unknown`, unknown ends by when they
ended (both name records, some of which may be gone), the fence counter, and the stream `ended` of watched claims that
were settled. KEYS are always (record, leases, unknown); what else a script needs comes after them. Instants are
milliseconds since 1970.
"""

from __future__ import annotations

from typing import Final

# A lapsed lease turns into what its holder left behind: nothing where running again is safe, an unknown end elsewhere.
_COMMON: Final = """
local record, leases, unknown = KEYS[1], KEYS[2], KEYS[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function add_unknown(name, ended)
  redis.call('ZADD', unknown, ended, name)
  for _, old in ipairs(redis.call('ZRANGE', unknown, 0, 7)) do
    if redis.call('EXISTS', old) == 0 then redis.call('ZREM', unknown, old) end
  end
end

local function lapse(name, lost_end)
  local r = redis.call('HMGET', name, 'st', 'lease', 'idem', 'uttl')
  if r[1] ~= 'r' or tonumber(r[2]) > now then return end
  redis.call('ZREM', leases, name)
  if r[3] == '1' then redis.call('DEL', name) return end
  local lease = tonumber(r[2])
  local expires = lease + tonumber(r[4])
  redis.call('HDEL', name, 'lease', 'watch')
  redis.call('HSET', name, 'st', 'u', 'end', lost_end, 'ended', lease, 'exp', expires, 'lapsed', 1)
  redis.call('PEXPIREAT', name, expires)
  add_unknown(name, lease)
end

local function keep_end(name, state, call, blob, ttl, by)
  redis.call('HDEL', name, 'holder', 'lease', 'watch', 'lapsed')
  redis.call('HSET', name, 'st', state, 'call', call, 'end', blob, 'ended', now, 'exp', now + ttl, 'by', by)
  redis.call('PEXPIREAT', name, now + ttl)
  if state == 'u' then add_unknown(name, now) else redis.call('ZREM', unknown, name) end
end
"""

# KEYS[4] the fence counter. After a loss of data it starts above every number it gave before: at the clock.
CLAIM: Final = (
    _COMMON
    + """
local lost_end, fp, call, holder, idem, uttl, lease_ms, scope = unpack(ARGV)
lapse(record, lost_end)
local r = redis.call('HMGET', record, 'st', 'fp', 'call', 'fence', 'holder', 'end')
if not r[1] then
  local fence = redis.call('INCR', KEYS[4])
  if fence == 1 then
    fence = now
    redis.call('SET', KEYS[4], now)
  end
  local lease = now + lease_ms
  redis.call('HSET', record, 'st', 'r', 'fp', fp, 'call', call, 'fence', fence, 'idem', idem, 'uttl', uttl,
    'scope', scope, 'holder', holder, 'lease', lease)
  if idem == '1' then
    redis.call('PEXPIREAT', record, lease)
  else
    redis.call('PEXPIREAT', record, lease + uttl)
    redis.call('ZADD', leases, lease, record)
  end
  return {'claimed', fence}
end
if r[2] ~= fp then return {'conflicting', r[3]} end
if r[1] ~= 'r' then return {'kept', r[3], r[6]} end
if r[5] == holder then return {'claimed', tonumber(r[4])} end
return {'in_flight', r[3], tonumber(r[4])}
"""
)

# A claim whose maker never learnt of it: nothing ran under it.
RELEASE: Final = (
    _COMMON
    + """
local lost_end, holder = unpack(ARGV)
local r = redis.call('HMGET', record, 'st', 'holder')
if not r[1] or r[1] == 'e' or r[2] ~= holder then return 0 end
redis.call('DEL', record)
redis.call('ZREM', leases, record)
redis.call('ZREM', unknown, record)
return 1
"""
)

# KEYS[4] the stream. `again`: asked a second time, since the first answer was lost on the way.
SETTLE: Final = (
    _COMMON
    + """
local lost_end, fence, state, call, blob, ttl, by, large, again, stream_max = unpack(ARGV)
lapse(record, lost_end)
local r = redis.call('HMGET', record, 'st', 'fence', 'by', 'watch', 'idem')
if not r[1] then return (state == 'free' and again == '1') and 1 or 0 end
if r[2] ~= fence then return 0 end
if r[1] ~= 'r' then return (r[3] == by) and 1 or 0 end
redis.call('ZREM', leases, record)
if state == 'free' or (large == '1' and r[5] == '1') then
  redis.call('DEL', record)
else
  keep_end(record, state, call, blob, ttl, by)
end
if r[4] then redis.call('XADD', KEYS[4], 'MAXLEN', '~', stream_max, '*', 'record', record, 'fence', fence) end
return 1
"""
)

RESOLVE: Final = (
    _COMMON
    + """
local lost_end, state, call, blob, ttl, by, large, again = unpack(ARGV)
lapse(record, lost_end)
local r = redis.call('HMGET', record, 'st', 'by', 'idem')
if r[1] ~= 'u' then
  if again == '1' and (r[2] == by or (state == 'free' and not r[1])) then return 1 end
  return 0
end
if state == 'free' or (large == '1' and r[3] == '1') then
  redis.call('DEL', record)
  redis.call('ZREM', unknown, record)
else
  keep_end(record, state, call, blob, ttl, by)
end
return 1
"""
)

# KEYS[1] is the rate's hash: `t0`, when it began to be used after it was idle, and `n`, what was taken since then, in
# units of 1/count ms, in which every sum is whole (`policy.rate`).
TAKE_PLACE: Final = (
    _COMMON
    + """
local count, per, patience = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local r = redis.call('HMGET', record, 't0', 'n')
local t0, n = tonumber(r[1] or now), tonumber(r[2] or 0)
if n <= (now - t0) * count then t0, n = now, 0 end
local at = math.max(now, t0 + math.ceil((n - per * (count - 1)) / count))
if at - now > patience then return {at - now, ''} end
n = n + per
redis.call('HSET', record, 't0', t0, 'n', n)
redis.call('PEXPIREAT', record, t0 + math.ceil(n / count) + 1)
return {at - now, string.format('%.0f-%.0f', t0, n)}
"""
)

GIVE_PLACE_BACK: Final = (
    _COMMON
    + """
local mark, per = ARGV[2], tonumber(ARGV[3])
local r = redis.call('HMGET', record, 't0', 'n')
if not r[1] or string.format('%.0f-%.0f', tonumber(r[1]), tonumber(r[2])) ~= mark then return 0 end
redis.call('HSET', record, 'n', tonumber(r[2]) - per)
return 1
"""
)

FIND: Final = (
    _COMMON
    + """
local lost_end = ARGV[1]
lapse(record, lost_end)
local r = redis.call('HMGET', record, 'st', 'call', 'end')
if not r[1] or r[1] == 'r' then return false end
return {r[2], r[3]}
"""
)

# How long the claim may still stand, in milliseconds, and from now on its end is told; -1: it stands no more.
WATCH: Final = (
    _COMMON
    + """
local lost_end, fence = unpack(ARGV)
lapse(record, lost_end)
local r = redis.call('HMGET', record, 'st', 'fence', 'lease')
if r[1] ~= 'r' or r[2] ~= fence then return -1 end
redis.call('HSET', record, 'watch', 1)
return tonumber(r[3]) - now
"""
)

# KEYS[1] is not used; KEYS from 4 are records, ARGV from 3 their fences. Gives the positions of those that are lost.
RENEW: Final = (
    _COMMON
    + """
local lost_end, lease_ms = ARGV[1], ARGV[2]
local lost = {}
for i = 4, #KEYS do
  local name = KEYS[i]
  lapse(name, lost_end)
  local r = redis.call('HMGET', name, 'st', 'fence', 'idem', 'uttl')
  if r[1] == 'r' and r[2] == ARGV[i - 1] then
    local lease = now + lease_ms
    redis.call('HSET', name, 'lease', lease)
    if r[3] == '1' then
      redis.call('PEXPIREAT', name, lease)
    else
      redis.call('PEXPIREAT', name, lease + tonumber(r[4]))
      redis.call('ZADD', leases, lease, name)
    end
  else
    lost[#lost + 1] = i - 4
  end
end
return lost
"""
)

# One page of the unknown ends, from rank `start`. Gives how many leases had lapsed, how many names
# were looked at, how many of them stay, and the records.
LIST_UNKNOWN: Final = (
    _COMMON
    + """
local lost_end, start, count, tenant = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local lapsed = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, count)
for _, name in ipairs(lapsed) do
  lapse(name, lost_end)
  redis.call('ZREM', leases, name)
end
local names = redis.call('ZRANGE', unknown, start, start + count - 1)
local stay, found = 0, {}
for _, name in ipairs(names) do
  local r = redis.call('HMGET', name, 'st', 'scope', 'call', 'end', 'ended', 'exp')
  if r[1] == 'u' then
    stay = stay + 1
    if tenant == '' or cjson.decode(r[2])[1] == tenant then
      found[#found + 1] = {r[2], r[3], r[4], r[5], r[6]}
    end
  else
    redis.call('ZREM', unknown, name)
  end
end
return {#lapsed, #names, stay, found}
"""
)
