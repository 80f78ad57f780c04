-- The fleet's load. ARGV: owner, fence, service, whether blocks are counted (0, 1).
-- Returns pending pages, length of the prefill line, of the decode line, the hash blocks as a flat
-- list (empty where they are not counted), then for every worker with a lease: id, epoch,
-- is_draining, load, pages reserved.
local owner, fence, service, counts_blocks = unpack(ARGV)
if not is_known(owner, fence) then return unknown_router() end

local function counters(name)
  local flat, sums = redis.call('HGETALL', P .. name), {}
  for i = 1, #flat, 2 do sums[flat[i]] = flat[i + 1] end
  return sums
end

local load, pages = counters('load'), counters('pages')
local reply = {
  redis.call('HGET', P .. 'pending_pages', service) or '0',
  redis.call('ZCARD', line_key('prefill', service)),
  redis.call('ZCARD', line_key('decode', service)),
  counts_blocks == '1' and redis.call('HGETALL', P .. 'blocks') or {},
}
for _, worker in ipairs(redis.call('SMEMBERS', P .. 'workers')) do
  local lease = redis.call('HMGET', P .. 'worker:' .. worker, 'epoch', 'is_draining')
  if lease[1] then
    local place, n = worker .. US .. lease[1], #reply
    reply[n + 1], reply[n + 2], reply[n + 3] = worker, lease[1], lease[2] or '0'
    reply[n + 4], reply[n + 5] = load[place] or '0', pages[place] or '0'
  end
end
return reply
