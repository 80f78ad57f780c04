-- The fields of a router's records. ARGV: owner.
return redis.call('HKEYS', P .. 'records:' .. ARGV[1])
