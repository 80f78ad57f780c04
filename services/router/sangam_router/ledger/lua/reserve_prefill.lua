-- Reserve budget and pages for a prefill; leaves the line on success.
-- ARGV: owner, fence, service, serial, block key, arrival, line member, worker, epoch, role,
--       model, protocol, sequence_tokens, cost_tokens, num_pages, num_blocks (0 or 1),
--       bound_tokens ('' for none).
-- Returns 'ok' or the reason of the refusal. The same serial again changes nothing.
local owner, fence, service, serial, block_key, arrival, member, worker, epoch, role, model,
  protocol, sequence_tokens, cost_tokens, num_pages, num_blocks, bound_tokens = unpack(ARGV)
if not is_known(owner, fence) then return unknown_router() end
if redis.call('HEXISTS', P .. 'records:' .. owner, serial .. ':load') == 1 then return 'ok' end

local reason, free_pages = refusal(worker, epoch, role, model, protocol, sequence_tokens)
if reason then return reason end
if role == 'decode' then return 'wrong_role' end
if is_behind('prefill', service, arrival, member) then return 'older_waits' end

-- Pending decodes come first for the pages of a worker that could take them.
num_pages = tonumber(num_pages)
if num_pages > 0 then
  if role == 'colocated' then
    free_pages = free_pages - (redis.call('HGET', P .. 'pending_pages', service) or 0)
  end
  if free_pages < num_pages then return 'no_pages' end
end
if bound_tokens ~= '' then
  local load = redis.call('HGET', P .. 'load', worker .. US .. epoch) or 0
  if tonumber(load) >= tonumber(bound_tokens) then return 'over_theta' end
end

create_record(owner, serial, 'load', cost_tokens, worker, epoch, block_key)
create_record(owner, serial, 'pages', num_pages, worker, epoch, block_key)
create_record(owner, serial, 'blocks', num_blocks, worker, epoch, block_key)
if depart('prefill', service, member) then wake(service) end
return 'ok'
