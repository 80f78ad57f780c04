-- Leave a line. ARGV: service, line, then line members. Needs no lease: the members are the caller's.
-- Returns the number of entries removed.
local service, line = ARGV[1], ARGV[2]
local num_removed = 0
for i = 3, #ARGV do
  if depart(line, service, ARGV[i]) then num_removed = num_removed + 1 end
end
if num_removed > 0 then wake(service) end
return num_removed
