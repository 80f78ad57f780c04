-- What both reserve scripts check of a worker. Put behind common.lua.

-- The reason why the worker may not take work that was placed on (epoch, role), or nil, and its
-- pages that no record holds.
local function refusal(worker, epoch, role, model, protocol, sequence_tokens)
  local lease = redis.call('HMGET', P .. 'worker:' .. worker,
    'epoch', 'is_draining', 'role', 'model', 'protocol', 'total_pages', 'max_sequence_tokens')
  if not lease[1] then return 'worker_gone' end
  if lease[1] ~= epoch then return 'worker_changed' end
  if lease[2] == '1' then return 'draining' end
  if lease[3] ~= role then return 'wrong_role' end
  if lease[4] ~= model or lease[5] ~= protocol then return 'incompatible' end
  if tonumber(sequence_tokens) > (tonumber(lease[7]) or math.huge) then return 'too_long' end
  local reserved = redis.call('HGET', P .. 'pages', worker .. US .. epoch) or 0
  return nil, (tonumber(lease[6]) or 0) - reserved
end
