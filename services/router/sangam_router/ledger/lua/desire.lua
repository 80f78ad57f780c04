-- What an operator wants of a worker, written only over an older wish. ARGV: worker, role,
-- is_drained (0, 1), version, the role it boots in, why the wish cannot be granted (or ''),
-- expiry in milliseconds, seconds in which workers' leases are back after Redis lost its data.
-- Returns 'stale', 'kept', 'applied', 'refused' or 'unsure', and the reason of a refusal.
local worker, role, is_drained, version, boot_role, objection, expiry, settle_seconds = unpack(ARGV)
local desired, refused = P .. 'desired:' .. worker, P .. 'refused:' .. worker

-- Versions are decimal numbers, too long for Lua's.
local function is_newer(a, b)
  if not a or a == '' then return false end
  if #a ~= #b then return #a > #b end
  return a > b
end

local function can_decode(a_role, drained)
  return a_role ~= 'prefill' and drained ~= '1'
end

-- Whether a worker decodes now and is meant to go on doing so.
local function decodes(id)
  local lease = redis.call('HMGET', P .. 'worker:' .. id, 'role', 'is_draining')
  if not lease[1] or not can_decode(lease[1], lease[2]) then return false end
  local wish = redis.call('HMGET', P .. 'desired:' .. id, 'role', 'is_drained')
  return can_decode(wish[1] or lease[1], wish[2] or '0')
end

local function is_last_to_decode()
  local now = redis.call('HMGET', desired, 'role', 'is_drained')
  local lease_role = redis.call('HGET', P .. 'worker:' .. worker, 'role')
  if not can_decode(now[1] or lease_role or boot_role, now[2]) then return false end
  for _, other in ipairs(redis.call('SMEMBERS', P .. 'workers')) do
    if other ~= worker and decodes(other) then return false end
  end
  return true
end

local function write(key, ...)
  redis.call('HSET', key, 'role', role, 'is_drained', is_drained, 'version', version, ...)
  redis.call('PEXPIRE', key, expiry)
end

-- Whether every worker that lives has its lease here. Without a generation no router has been here
-- yet; routers of versions that write no birth leave it unknown, which counts as long ago.
local function has_settled()
  if redis.call('EXISTS', P .. 'generation') == 0 then return false end
  local born = tonumber(redis.call('GET', P .. 'born') or 0)
  return tonumber(redis.call('TIME')[1]) - born > tonumber(settle_seconds)
end

if is_newer(redis.call('HGET', desired, 'version'), version)
    or is_newer(redis.call('HGET', refused, 'version'), version) then
  return {'stale', ''}
end

if objection == '' and not can_decode(role, is_drained) and is_last_to_decode() then
  -- Others may decode, and not be back yet.
  if not has_settled() then return {'unsure', ''} end
  objection = 'last_decode_worker'
end
if objection ~= '' then
  redis.call('PEXPIRE', desired, expiry)
  write(refused, 'reason', objection)
  return {'refused', objection}
end

local before = redis.call('HMGET', desired, 'role', 'is_drained')
redis.call('DEL', refused)
write(desired)
if before[1] == role and before[2] == is_drained then return {'kept', ''} end
return {'applied', ''}
