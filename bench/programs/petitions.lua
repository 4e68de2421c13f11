-- Submissions of petitions, for wrk: all of one length, each by a submitter of its own, no pipelining.
-- Arguments: host:port, path, the first 24 characters of the submitters' ids, then perhaps: keyed.
-- petition-body.ts makes the same.

local head, body, prefix, keyed
local n = 0

function init(args)
  local host, path = args[1], args[2]
  prefix = args[3]
  keyed = args[4] == "keyed"
  body = '{"type":"GENERAL","text":"The lamps of the harbour have been dark for a week; may they be lit again before winter. %012x"'
    .. ',"realm":"harbour","submitter_id":"' .. prefix .. '%012x"}'
  local length = #string.format(body, 0, 0)
  head = "POST " .. path .. " HTTP/1.1\r\nhost: " .. host
    .. "\r\ncontent-type: application/json\r\ncontent-length: " .. length .. "\r\n"
end

function request()
  n = n + 1
  local text = head
  if keyed then text = text .. string.format("idempotency-key: %s%012x\r\n", prefix, n) end
  return text .. "\r\n" .. string.format(body, n, n)
end

function done(summary, latency)
  local e = summary.errors
  io.write(string.format(
    'RESULT {"answered":%d,"refused":%d,"failed":%d,"seconds":%.6f,"p99Ms":%.4f}\n',
    summary.requests, e.status, e.connect + e.read + e.write + e.timeout, summary.duration / 1e6,
    latency:percentile(99) / 1000))
end
