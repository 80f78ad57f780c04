-- A worker's lease as a flat list of fields and values. ARGV: owner, fence, worker id.
return redis.call('HGETALL', P .. 'worker:' .. ARGV[3])
