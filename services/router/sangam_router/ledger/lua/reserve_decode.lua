-- Reserve pages for a prefilled block; leaves the decode line on success.
-- ARGV: owner, fence, service, serial, block key, arrival, line member, worker, epoch, role,
--       model, protocol, sequence_tokens, cost_tokens (0: a decode has no load record), num_pages,
--       num_blocks (0 or 1).
-- Returns 'ok' or the reason of the refusal. The same serial again changes nothing.
local owner, fence, service, serial, block_key, arrival, member, worker, epoch, role, model,
  protocol, sequence_tokens, _, num_pages, num_blocks = unpack(ARGV)
if not is_known(owner, fence) then return unknown_router() end
if redis.call('HEXISTS', P .. 'records:' .. owner, serial .. ':pages') == 1 then return 'ok' end

local reason, free_pages = refusal(worker, epoch, role, model, protocol, sequence_tokens)
if reason then return reason end
if role == 'prefill' then return 'wrong_role' end
if is_behind('decode', service, arrival, member) then return 'older_waits' end
if free_pages < tonumber(num_pages) then return 'no_pages' end

create_record(owner, serial, 'pages', num_pages, worker, epoch, block_key)
create_record(owner, serial, 'blocks', num_blocks, worker, epoch, block_key)
if depart('decode', service, member) then wake(service) end
return 'ok'
