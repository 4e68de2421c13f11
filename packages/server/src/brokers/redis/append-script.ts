/**
 * One atomic append in the server. A record's id in the Redis stream is `<last chunk>-<first chunk>`, so all chunks
 * after a cursor are one range, even if the cursor is inside a record.
 *
 * XADD only refuses ids that are not larger. It would write after an end, and leave a gap after a log whose newest part
 * the server has lost (a restart, a failover). Measured on 500 streams with records of 300 bytes: 15 µs of server time;
 * XADD and PEXPIRE take 4 µs.
 */
import { createHash } from 'node:crypto'
import type { Append } from 'spillway/workload'

export const appendScript = `
local key, id, first, writer, chunks, ended, behind, ttl = KEYS[1], unpack(ARGV)
local function fieldOf(entry, name)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == name then return entry[2][i + 1] end
  end
end
local top = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
local last = top and tonumber(string.match(top[1], '^%d+')) or 0
if last ~= tonumber(first) - 1 then
  local there = redis.call('XRANGE', key, id, id)[1]
  return there and fieldOf(there, 'w') == writer and 1 or 0
end
if top and fieldOf(top, 'e') then return 0 end
if behind ~= '' and not (top and top[1] == behind and fieldOf(top, 'w') == writer) then return 0 end
if ended == '' then
  redis.call('XADD', key, id, 'w', writer, 'c', chunks)
else
  redis.call('XADD', key, id, 'w', writer, 'c', chunks, 'e', ended)
end
if ttl ~= '' then redis.call('PEXPIRE', key, ttl) end
return 1
`

export const appendScriptSha = createHash('sha1').update(appendScript).digest('hex')

export interface Lifetimes {
  /** For a running stream. */
  longestMs: number
  /** For an ended stream. */
  retentionMs: number
}

export const idOf = ({ first, chunks }: Pick<Append, 'first' | 'chunks'>): string =>
  `${first + chunks.length - 1}-${first}`

/**
 * The arguments of EVALSHA after the hash and the number of keys. `behind`: the writer's previous record in the same
 * call. If that one was not written, neither is this one, even if it fits after a foreign record in its place.
 */
export function appendArguments(name: string, append: Append, behind: Append | null, times: Lifetimes): string[] {
  const { first, chunks, end, writer } = append
  // Set at both ends only: each change is another entry in the server's change log.
  const running = first === 1 ? `${times.longestMs + times.retentionMs}` : ''
  const ttl = end === null ? running : `${times.retentionMs}`
  const before = behind === null ? '' : idOf(behind)
  return [name, idOf(append), `${first}`, writer, JSON.stringify(chunks), end ?? '', before, ttl]
}
