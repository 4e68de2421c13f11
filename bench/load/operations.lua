-- Requests that hand over an operation each, for wrk: all of one length, none like another, no pipelining.
-- Arguments: host:port, path, target URL, lanes, unique prefix, then any of: async, keyed, identified.

local head, body, lanes, prefix, keyed, identified
local n = 0

function init(args)
  local host, path, target = args[1], args[2], args[3]
  lanes = tonumber(args[4])
  prefix = args[5]
  local async = false
  for i = 6, #args do
    if args[i] == "async" then async = true end
    if args[i] == "keyed" then keyed = true end
    if args[i] == "identified" then identified = true end
  end
  body = '{"type":"http.request","queue":"bench","partition":"lane-%06d","payload":{"url":"' .. target
    .. '","body":{"ref":"' .. prefix .. '-%09d"}}}'
  local length = #string.format(body, 0, 0)
  head = "POST " .. path .. " HTTP/1.1\r\nhost: " .. host
    .. "\r\ncontent-type: application/json\r\ncontent-length: " .. length .. "\r\n"
    .. (async and "prefer: respond-async\r\n" or "")
end

function request()
  n = n + 1
  -- A step that shares no factor with the usual lane counts: neighbours in time are no neighbours in the table.
  local lane = (n * 7919) % lanes
  local text = head
  if keyed then text = text .. string.format("idempotency-key: %s-%09d\r\n", prefix, n) end
  if identified then text = text .. string.format("x-user: user-%06d\r\n", lane) end
  return text .. "\r\n" .. string.format(body, lane, n)
end

function done(summary, latency)
  local e = summary.errors
  io.write(string.format(
    'RESULT {"requests":%d,"seconds":%.6f,"failed":%d,"p50Ms":%.4f,"p99Ms":%.4f}\n',
    summary.requests, summary.duration / 1e6, e.connect + e.read + e.write + e.status + e.timeout,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000))
end
