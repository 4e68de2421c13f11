-- Pushes, for wrk: all of one length, no message like another, no pipelining.
-- Arguments: host:port, path, queue, partitions, items of a request, partitions of a request, first number, padding.
-- message-body.ts makes the same.

local head, item, partitions, items, lanes, first
local r = -1

function init(args)
  local host, path, queue = args[1], args[2], args[3]
  partitions, items, lanes, first = tonumber(args[4]), tonumber(args[5]), tonumber(args[6]), tonumber(args[7])
  item = '{"queue":"' .. queue .. '","partition":"p%05d","payload":{"n":%09d,"pad":"' .. args[8] .. '"}}'
  local length = #'{"items":[]}' + items * #string.format(item, 0, 0) + items - 1
  head = "POST " .. path .. " HTTP/1.1\r\nhost: " .. host
    .. "\r\ncontent-type: application/json\r\ncontent-length: " .. length .. "\r\n\r\n"
end

function request()
  r = r + 1
  if items == 1 then
    return head .. '{"items":[' .. string.format(item, (r * lanes) % partitions, first + r) .. ']}'
  end
  local texts = {}
  for i = 0, items - 1 do
    local lane = (r * lanes + math.floor(i * lanes / items)) % partitions
    texts[i + 1] = string.format(item, lane, first + r * items + i)
  end
  return head .. '{"items":[' .. table.concat(texts, ",") .. ']}'
end

function done(summary, latency)
  local e = summary.errors
  io.write(string.format(
    'RESULT {"answered":%d,"refused":%d,"failed":%d,"seconds":%.6f,"p99Ms":%.4f}\n',
    summary.requests, e.status, e.connect + e.read + e.write + e.timeout, summary.duration / 1e6,
    latency:percentile(99) / 1000))
end
