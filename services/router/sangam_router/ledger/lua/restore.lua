-- Re-assert records that a router holds, after Redis lost them.
-- ARGV: owner, fence, then groups of: serial, block key, worker, epoch, load tokens, pages, blocks.
-- A record that is there already is left alone. Where the worker has no lease (yet), or another
-- epoch, nothing is restored: it would be reaped. Returns the number of groups restored.
local owner, fence = ARGV[1], ARGV[2]
if not is_known(owner, fence) then return unknown_router() end
local num_restored = 0
for i = 3, #ARGV, 7 do
  local serial, block_key, worker, epoch, tokens, pages, blocks = unpack(ARGV, i, i + 6)
  if redis.call('HGET', P .. 'worker:' .. worker, 'epoch') == epoch then
    create_record(owner, serial, 'load', tokens, worker, epoch, block_key)
    create_record(owner, serial, 'pages', pages, worker, epoch, block_key)
    create_record(owner, serial, 'blocks', blocks, worker, epoch, block_key)
    num_restored = num_restored + 1
  end
end
return num_restored
