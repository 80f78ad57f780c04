-- Enter a line. ARGV: owner, fence, service, line, arrival, line member, limit ('' for none).
-- Returns 'ok', also when it stands there already, or 'full'.
local owner, fence, service, line, arrival, member, limit = unpack(ARGV)
if not is_known(owner, fence) then return unknown_router() end
local key = line_key(line, service)
if redis.call('ZSCORE', key, member) then return 'ok' end
if limit ~= '' and redis.call('ZCARD', key) >= tonumber(limit) then return 'full' end
enter(line, service, arrival, member)
return 'ok'
