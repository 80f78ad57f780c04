-- Everything the ledger holds, of all routers and services, at one instant. ARGV: not used.
-- Returns the hashes load, pages, blocks and pending_pages as flat lists, the flat list of records
-- (owner, field, value) and of line entries (service, line, member).
local records, entries, services = {}, {}, {}
local routers = redis.call('HGETALL', P .. 'routers')
for i = 1, #routers, 2 do
  services[routers[i + 1]] = true
  local flat = redis.call('HGETALL', P .. 'records:' .. routers[i])
  for j = 1, #flat, 2 do
    local n = #records
    records[n + 1], records[n + 2], records[n + 3] = routers[i], flat[j], flat[j + 1]
  end
end
for service in pairs(services) do
  for _, line in ipairs({'prefill', 'decode'}) do
    for _, member in ipairs(redis.call('ZRANGE', line_key(line, service), 0, -1)) do
      local n = #entries
      entries[n + 1], entries[n + 2], entries[n + 3] = service, line, member
    end
  end
end
return {
  redis.call('HGETALL', P .. 'load'),
  redis.call('HGETALL', P .. 'pages'),
  redis.call('HGETALL', P .. 'blocks'),
  redis.call('HGETALL', P .. 'pending_pages'),
  records,
  entries,
}
