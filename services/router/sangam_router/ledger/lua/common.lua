-- Put before every script. KEYS[1] is the ledger's key prefix, whose hash tag all keys share.
--
-- Keys (behind the prefix):
--   workers, worker:ID        leases, written by the workers (sangam_core/lease.py)
--   desired:ID, refused:ID    what operators want of workers, and what was not granted (desire.lua)
--   router:OWNER              a router's lease: its fence, with expiry
--   generation, born          a random word, set when missing: tells an emptied Redis; and since when
--                             (seconds of the server's clock) it is there
--   routers                   hash OWNER -> service, of every router not reaped yet
--   records:OWNER             hash SERIAL:load | SERIAL:pages | SERIAL:blocks -> record (see
--                             encode_record)
--   load, pages, blocks       hashes WORKER US EPOCH -> sum of the records; no field means 0
--   line:prefill:SERVICE, line:decode:SERVICE
--                             sorted sets by arrival: REQUEST US OWNER US pages
--   pending_pages             hash SERVICE -> sum of the decode line's pages; no field means 0
--   wake                      pub/sub channel
-- US is the ASCII unit separator; ids hold no control characters.

-- Effects, not the script, go to replicas: some scripts write after reading a set. (A default
-- from Redis 7 on, and Valkey may lack the function.)
if redis.replicate_commands then redis.replicate_commands() end

local P = KEYS[1]
local US = '\31'

local function router_is_live(owner)
  return redis.call('EXISTS', P .. 'router:' .. owner) == 1
end

-- A router without a lease of this very fence must register first: its records may be gone, or
-- the call is a ghost of a connection it has given up.
local function is_known(owner, fence)
  return redis.call('GET', P .. 'router:' .. owner) == fence
end

local function unknown_router()
  return redis.error_reply('UNKNOWN_ROUTER register first')
end

local function add(counter, field, amount)
  if redis.call('HINCRBY', P .. counter, field, amount) == 0 then
    redis.call('HDEL', P .. counter, field)
  end
end

-- Records. The only places where load, pages and blocks change. A blocks record is 1, stands beside
-- a pages record, and is made by routers whose placement counts blocks. It is a record of its own, so
-- that routers of versions without it delete it as they do any other.

local function encode_record(amount, worker, epoch, block_key)
  return amount .. US .. worker .. US .. epoch .. US .. block_key
end

local function create_record(owner, serial, counter, amount, worker, epoch, block_key)
  if tonumber(amount) == 0 then return end
  local value = encode_record(amount, worker, epoch, block_key)
  if redis.call('HSETNX', P .. 'records:' .. owner, serial .. ':' .. counter, value) == 1 then
    add(counter, worker .. US .. epoch, amount)
  end
end

local function delete_record(owner, field, value)
  if redis.call('HDEL', P .. 'records:' .. owner, field) == 0 then return false end
  local amount, place = string.match(value, '^(%d+)\31([^\31]*\31[^\31]*)\31')
  add(string.match(field, ':(%a+)$'), place, -amount)
  return true
end

-- Lines. The only place where pending_pages changes.

local function line_key(line, service)
  return P .. 'line:' .. line .. ':' .. service
end

local function owner_of(member)
  return string.match(member, '^[^\31]*\31([^\31]*)\31')
end

local function pages_of(member)
  return string.match(member, '\31(%d+)$')
end

local function enter(line, service, arrival, member)
  if redis.call('ZADD', line_key(line, service), 'NX', arrival, member) == 1 and line == 'decode' then
    add('pending_pages', service, pages_of(member))
  end
end

local function depart(line, service, member)
  if redis.call('ZREM', line_key(line, service), member) == 0 then return false end
  if line == 'decode' then add('pending_pages', service, -pages_of(member)) end
  return true
end

-- Whether a live request stands before (arrival, member). Entries of dead routers at the head
-- are removed on the way. Of two that arrived at the same instant the one that is in the line
-- goes first; a newcomer enters it and gets the order of the ids.
local function is_behind(line, service, arrival, member)
  while true do
    local head = redis.call('ZRANGE', line_key(line, service), 0, 0, 'WITHSCORES')
    if #head == 0 or head[1] == member or tonumber(head[2]) > tonumber(arrival) then return false end
    if router_is_live(owner_of(head[1])) then return true end
    depart(line, service, head[1])
  end
end

local function head_owner(line, service)
  local head = redis.call('ZRANGE', line_key(line, service), 0, 0)
  return head[1] and owner_of(head[1]) or ''
end

-- Something came free: the routers of the two heads look again, nobody else (the order is strict).
local function wake(service)
  local prefill, decode = head_owner('prefill', service), head_owner('decode', service)
  if prefill ~= '' or decode ~= '' then
    redis.call('PUBLISH', P .. 'wake', 'head' .. US .. prefill .. US .. decode)
  end
end
