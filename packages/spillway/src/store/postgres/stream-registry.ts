/** The streams by id. Calls of one kind that arrive while its statement is under way share the next one. */
import { Flush } from '../../accept/flush.js'
import { isUuid } from '../../core/ids.js'
import type { EndKind, OpenRequest, StreamEntry, StreamRegistry } from '../../streams/port.js'
import type { Tx } from '../port.js'
import { plainArray, textArray } from './arrays.js'
import { StoreFault } from './faults.js'
import type { StreamBell } from './stream-bell.js'

export interface StreamRegistryOptions {
  /** Opening, watching and looking up. */
  query: Tx['query']
  sweep: Tx['query']
  bell: StreamBell
  /** The schema, quoted. */
  schema: string
  /** How long a call waits for its turn. */
  timeoutMs: number
  /** How long a stream can be read after its end. */
  retentionMs: number
  /** How long a stream may last: older ones without an end will not get one. */
  longestMs: number
}

const itemsMax = 500
/** Entries removed by one transaction of a sweep. */
const sweepRows = 2_000

/** The columns of the functions that return streams. */
const entryColumns = `id, identity, format, thread_id AS "threadId", log, direct, born_ms AS "bornMs", age_ms AS "ageMs", ended,
  ended_ms_ago AS "endedMsAgo", last`

type EntryRow = Omit<StreamEntry, 'key'> &
  StreamEntry['key'] & { endedMsAgo: number | null; created?: boolean } & Record<string, unknown>

interface Watch {
  id: string
  watcher: string
  reads: boolean
}

export function postgresStreamRegistry(options: StreamRegistryOptions): StreamRegistry {
  const { query, schema: s } = options
  const { opening, finding, watching, finishing } = groupedCalls(options)

  return {
    open: (request) => opening.submit(request),
    find: async (id) => (isUuid(id) ? finding.submit({ id }) : null),
    ended: async (id, end) => void (await finishing.submit({ id, end })),
    moved: async (id, log) => {
      await query(`UPDATE ${s}.streams SET log = $2 WHERE id = $1 AND ended IS NULL`, [id, log])
    },
    watched: async (id, watcher) => void (await watching.submit({ id, watcher, reads: true })),
    unwatched: (id, watcher) => watching.submit({ id, watcher, reads: false }),
    abandoned: async (of) => {
      if (of.length === 0) return []
      const { rows } = await query<{ id: string; for_ms: number }>(`SELECT * FROM ${s}.stream_abandoned($1)`, [
        plainArray(of),
      ])
      return rows.map(({ id, for_ms }) => ({ id, forMs: for_ms }))
    },
    orphaned: async (everyMs, graceMs) => {
      const sql = `SELECT ${entryColumns} FROM ${s}.stream_orphans($1, $2, $3)`
      return (await query<EntryRow>(sql, [everyMs, graceMs, itemsMax])).rows.map(entryOf)
    },
    sweep: (retention, longest) => sweepStreams(options, retention, longest),
  }
}

/** Opening, finding, watching and ending: each is one statement for all calls that waited. */
function groupedCalls(options: StreamRegistryOptions) {
  const { query, bell, schema: s, retentionMs, longestMs } = options
  const flush = <Item extends { id: string }, Answer>(write: (items: readonly Item[]) => Promise<Answer[]>) =>
    new Flush<Item, Answer>({
      write,
      isPoison: (fault) => fault instanceof StoreFault && fault.code === 'data',
      // Calls for one stream keep their order.
      exclusiveKey: ({ id }) => id,
      sizeOf: () => 1,
      itemsMax,
      bytesMax: itemsMax,
      waitingMax: Number.POSITIVE_INFINITY,
      timeoutMs: options.timeoutMs,
      timeoutFault: () => new StoreFault('timeout'),
    })
  const ids = (items: readonly { id: string }[]): string => plainArray(items.map(({ id }) => id))

  const opening = flush<OpenRequest, StreamEntry & { created: boolean }>(async (items) => {
    const { rows } = await query<EntryRow>(
      `SELECT ${entryColumns}, created FROM ${s}.stream_open($1, $2, $3, $4, $5, $6, $7, $8)`,
      [
        ids(items),
        textArray(items.map(({ identity }) => identity)),
        textArray(items.map(({ format }) => format)),
        textArray(items.map(({ threadId }) => threadId)),
        textArray(items.map(({ log }) => log)),
        plainArray(items.map(({ direct }) => direct)),
        plainArray(items.map(({ watcher }) => watcher)),
        plainArray(items.map(({ acceptedMsAgo }) => Math.max(0, Math.round(acceptedMsAgo ?? 0)))),
      ],
    )
    const byId = new Map(rows.map((row) => [row.id, row]))
    return items.map(({ id }) => {
      const row = byId.get(id.toLowerCase())
      if (row === undefined) throw new Error(`the stream ${id} was opened but is not there`)
      return { ...entryOf(row), created: row.created === true }
    })
  })

  const finding = flush<{ id: string }, StreamEntry | null>(async (items) => {
    const { rows } = await query<EntryRow>(`SELECT ${entryColumns} FROM ${s}.stream_entries($1)`, [ids(items)])
    const byId = new Map(rows.map((row) => [row.id, row]))
    return items.map(({ id }) => {
      const row = byId.get(id.toLowerCase())
      return row === undefined || isExpired(row) ? null : entryOf(row)
    })
  })

  const isExpired = ({ endedMsAgo, ageMs }: EntryRow): boolean =>
    endedMsAgo === null ? ageMs > longestMs + retentionMs : endedMsAgo > retentionMs

  const watching = flush<Watch, boolean>(async (items) => {
    const { rows } = await query<{ heeded: boolean[] }>(`SELECT ${s}.stream_watch($1, $2, $3) AS heeded`, [
      ids(items),
      plainArray(items.map(({ watcher }) => watcher)),
      plainArray(items.map(({ reads }) => reads)),
    ])
    for (const { id, watcher, reads } of items) if (reads) bell.ring(`stream-watch:${id}:${watcher}`)
    return items.map((_, i) => rows[0]?.heeded[i] === true)
  })

  const finishing = flush<{ id: string; end: EndKind }, null>(async (items) => {
    await query(`SELECT ${s}.stream_ended($1, $2)`, [ids(items), textArray(items.map(({ end }) => end))])
    return items.map(() => null)
  })

  return { opening, finding, watching, finishing }
}

async function sweepStreams(
  { sweep, schema: s }: StreamRegistryOptions,
  retention: number,
  longest: number,
): Promise<{ streams: number; partitions: number; isFull: boolean }> {
  /** Null: another process sweeps. */
  const swept = async (call: string, ...values: number[]): Promise<number | null> => {
    const places = values.map((_, i) => `$${i + 1}`).join(', ')
    const { rows } = await sweep<{ n: number | null }>(`SELECT ${s}.${call}(${places}) AS n`, values)
    return rows[0]?.n ?? null
  }

  const kept = retention + longest
  const streams = (await swept('stream_sweep_entries', retention, longest, sweepRows)) ?? 0
  if (streams >= sweepRows) return { streams, partitions: 0, isFull: true }
  await swept('stream_sweep_ahead', kept)
  return { streams, partitions: (await swept('stream_sweep_behind', kept, sweepRows)) ?? 0, isFull: false }
}

const entryOf = ({ id, bornMs, endedMsAgo, created, ...entry }: EntryRow): StreamEntry => ({
  key: { id, bornMs },
  ...entry,
})
