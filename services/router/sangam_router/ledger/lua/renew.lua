-- A router's heartbeat: renews its lease and reaps whoever expired.
-- ARGV: owner, fence, lease_ms, service.
-- Returns the heads of the two lines where they are its own ('' otherwise), and the fields of its
-- records.
local owner, fence, lease_ms, service = unpack(ARGV)
if not is_known(owner, fence) then return unknown_router() end
redis.call('PEXPIRE', P .. 'router:' .. owner, lease_ms)
redis.call('HSET', P .. 'routers', owner, service)

local reaped = false

local function each_record(of, doomed)
  local flat = redis.call('HGETALL', P .. 'records:' .. of)
  for i = 1, #flat, 2 do
    if doomed(flat[i + 1]) then reaped = delete_record(of, flat[i], flat[i + 1]) or reaped end
  end
end

local function reap_router(dead, its_service)
  each_record(dead, function() return true end)
  for _, line in ipairs({'prefill', 'decode'}) do
    for _, member in ipairs(redis.call('ZRANGE', line_key(line, its_service), 0, -1)) do
      if owner_of(member) == dead then reaped = depart(line, its_service, member) or reaped end
    end
  end
  redis.call('HDEL', P .. 'routers', dead)
end

-- Places (worker US epoch) that records name but no lease backs any more.
local function stale_places()
  local stale, any = {}, false
  for _, counter in ipairs({'load', 'pages'}) do
    for _, place in ipairs(redis.call('HKEYS', P .. counter)) do
      local worker, epoch = string.match(place, '^([^\31]*)\31(.*)$')
      if redis.call('HGET', P .. 'worker:' .. worker, 'epoch') ~= epoch then
        stale[place], any = true, true
      end
    end
  end
  return any and stale
end

local routers = redis.call('HGETALL', P .. 'routers')
for i = 1, #routers, 2 do
  if not router_is_live(routers[i]) then reap_router(routers[i], routers[i + 1]) end
end
local stale = stale_places()
if stale then
  for i = 1, #routers, 2 do
    each_record(routers[i], function(value)
      return stale[string.match(value, '^%d+\31([^\31]*\31[^\31]*)\31')]
    end)
  end
end
for _, worker in ipairs(redis.call('SMEMBERS', P .. 'workers')) do
  if redis.call('EXISTS', P .. 'worker:' .. worker) == 0 then
    redis.call('SREM', P .. 'workers', worker)
    reaped = true
  end
end
if reaped then redis.call('PUBLISH', P .. 'wake', 'reaped') end

local function own_head(line)
  local head = redis.call('ZRANGE', line_key(line, service), 0, 0)[1]
  return head and owner_of(head) == owner and head or ''
end
return {own_head('prefill'), own_head('decode'), redis.call('HKEYS', P .. 'records:' .. owner)}
