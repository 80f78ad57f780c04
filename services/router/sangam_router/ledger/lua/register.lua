-- Give the router a lease under a new fence. ARGV: owner, fence, lease_ms, service.
-- Returns whether it had one, under whatever fence (then nobody has reaped its records), and the
-- generation of the data: a word that a Redis which came back empty no longer knows.
local owner, fence, lease_ms, service = unpack(ARGV)
local had_lease = router_is_live(owner) and 1 or 0
redis.call('SET', P .. 'router:' .. owner, fence, 'PX', lease_ms)
redis.call('HSET', P .. 'routers', owner, service)
if redis.call('SET', P .. 'generation', fence, 'NX') then
  redis.call('SET', P .. 'born', redis.call('TIME')[1])
end
return {had_lease, redis.call('GET', P .. 'generation')}
