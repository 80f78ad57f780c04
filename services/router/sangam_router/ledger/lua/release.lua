-- Delete records. ARGV: owner, service, then record fields (SERIAL:load, ...).
-- A record that is not there (released before, reaped) is skipped. Needs no lease: it can only
-- take away what this router had created. Returns the number of records deleted.
local owner, service = ARGV[1], ARGV[2]
local num_deleted = 0
for i = 3, #ARGV do
  local value = redis.call('HGET', P .. 'records:' .. owner, ARGV[i])
  if value and delete_record(owner, ARGV[i], value) then num_deleted = num_deleted + 1 end
end
if num_deleted > 0 then wake(service) end
return num_deleted
