-- Tasks to decide, for wrk: all of one length, each with a request id of its own, over several tenants, no pipelining.
-- Arguments: host:port, path, the first 24 characters of the request ids, how many tenants.
-- routing-body.ts makes the same.

local head, body, prefix, tenants
local n = 0

function init(args)
  local host, path = args[1], args[2]
  prefix = args[3]
  tenants = tonumber(args[4])
  body = '{"version":"1","request_id":"' .. prefix .. '%012x","tenant_id":"tenant-%03d","task":{"type":"text.summary"'
    .. ',"payload_ref":"s3://harbour/logs/' .. prefix .. '%012x"},"constraints":{"max_latency_ms":500}'
    .. ',"metadata":{"origin":"lighthouse"}}'
  local length = #string.format(body, 0, 0, 0)
  head = "POST " .. path .. " HTTP/1.1\r\nhost: " .. host
    .. "\r\ncontent-type: application/json\r\ncontent-length: " .. length .. "\r\n\r\n"
end

function request()
  n = n + 1
  return head .. string.format(body, n, (n * 7919) % tenants, n)
end

function done(summary, latency)
  local e = summary.errors
  io.write(string.format(
    'RESULT {"answered":%d,"refused":%d,"failed":%d,"seconds":%.6f,"p50Ms":%.4f,"p99Ms":%.4f}\n',
    summary.requests, e.status, e.connect + e.read + e.write + e.timeout, summary.duration / 1e6,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000))
end
