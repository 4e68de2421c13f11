import type { StreamLog, StreamRegistry } from '../../streams/port.js'
import { withDeadline } from '../../time/with-deadline.js'
import type { Tx } from '../port.js'
import { acceptStatements } from './accept.js'
import { type Database, openDatabase } from './database.js'
import { gateStatements } from './gates.js'
import { coreSql } from './generated/sql.js'
import { laneStatements } from './lanes.js'
import { ledgerStatements } from './ledger.js'
import { type Listener, listenOn, pollInstead } from './listen.js'
import { migrate } from './migrate.js'
import { statusStatements } from './operation-status.js'
import type { PostgresOptions } from './options.js'
import { processStatements } from './processes.js'
import { progressStatements } from './progress.js'
import { scheduleStatements } from './schedules.js'
import { workStatements } from './step.js'
import { StreamBell } from './stream-bell.js'
import { PostgresStreamLog } from './stream-log.js'
import { postgresStreamRegistry } from './stream-registry.js'
import { sweepStatements } from './sweeping.js'
import { cancelStatements, deadLetterStatements, ticketStatements } from './tickets.js'

export { isPostgresUrl, type PostgresOptions } from './options.js'

/** Begins the notices for streams. */
const streamsPrefix = 'streams:'

/** Wake-ups between processes, and the streams, which are woken by the same connection. */
function notices(options: PostgresOptions, db: Database) {
  const { s: schema, channel, log, timeoutMs, pools, statements, on, slowly } = db
  let listener: Listener | undefined
  let streamLog: PostgresStreamLog | undefined
  return {
    /** Notifies other processes of work. A hint: the pulse is authoritative. */
    wake: async (kind: 'ready' | 'cancel'): Promise<void> => {
      await on.heartbeat('SELECT pg_notify($1, $2)', [channel, kind])
    },
    /** `onMissed`: notifications may be lost; each second if listening is not possible. */
    listen: async (onWake: (kind: string) => void, onMissed?: () => void): Promise<void> => {
      const { listenUrl } = options
      const missed = (): void => {
        streamLog?.heard(null)
        onMissed?.()
      }
      if (listenUrl === undefined && (await pools.reach()) === 'transaction') {
        log.warn(
          {},
          'the pooler cannot carry LISTEN: polling each second; set SPILLWAY_LISTEN_URL to a direct address of the database for quicker wake-ups',
        )
        listener = pollInstead(missed)
        return
      }
      const onNotice = (kind: string): void =>
        kind.startsWith(streamsPrefix) ? streamLog?.heard(kind.slice(streamsPrefix.length)) : onWake(kind)
      listener = listenOn({ url: listenUrl ?? db.origin, channel, onNotice, onGap: missed, log })
      await listener.started
    },
    /**
     * The streams in this store; for one user. `longestMs`: how long a stream may last; `retentionMs`: how long it is kept
     * after that.
     */
    streams: (spans: { retentionMs: number; longestMs: number }): { log: StreamLog; registry: StreamRegistry } => {
      if (streamLog !== undefined) throw new Error('the streams of this store are in use already')
      pools.openStreams()
      const query = db.streams
      const bell = new StreamBell({ query: statements.take, channel })
      const append: Tx['query'] = (text, values) => slowly(() => query(text, values))
      streamLog = new PostgresStreamLog({ append, read: query, bell, schema })
      const registry = postgresStreamRegistry({ query, sweep: on.sweep, bell, schema, timeoutMs, ...spans })
      return { log: streamLog, registry }
    },
    /** Waits for statements in progress, for at most `waitMs` and the time limit of a statement. */
    close: async (waitMs = timeoutMs): Promise<void> => {
      const ended = Promise.all([listener?.close(), pools.end()])
      // A pool waits for its statements, the wake-up connection for its end; a server that never answers must not delay closing.
      await withDeadline(ended, Math.min(waitMs, timeoutMs), () => undefined)
    },
  }
}

/**
 * The store of the core, on a user's server or on the embedded one; `test/conformance` runs on both. Its type is `Store`.
 *
 * Every method throws `StoreFault` when the database cannot do its work; expected outcomes are values.
 */
export function postgresStore(options: PostgresOptions) {
  const db = openDatabase(options)
  const { s, schema, log, pools, on, value } = db
  return {
    /** Migrates the schema to this version. Safe to call from several processes at once. */
    migrate: (): Promise<{ from: number; to: number }> =>
      migrate({ url: db.origin, schema, sql: [coreSql, ...(options.sql ?? [])], log }),
    ...acceptStatements(db),
    ...workStatements(db),
    ...processStatements(db),
    ...scheduleStatements(db),
    ...progressStatements(db),
    ...sweepStatements(db),
    ...ticketStatements(db),
    ...statusStatements(db),
    ...deadLetterStatements(db),
    ...cancelStatements(db),
    ...laneStatements(db),
    ...ledgerStatements(db),
    ...gateStatements(db),
    ...notices(options, db),
    /** Reads of the user's own tables. */
    read: on.reads,
    /** Prepared once per connection, so there must be few of them. */
    statements: db.statements,
    poolState: pools.state,
    /** Host, port and database, for messages. */
    address: db.origin.address,
    /** Milliseconds between this process's clock and the store's. */
    ping: async (): Promise<{ skewMs: number }> => {
      const before = Date.now()
      const theirs = (await value<number>(on.heartbeat, `extract(epoch FROM ${s}.clock())::float8 * 1000`, [])) ?? 0
      return { skewMs: Math.round(theirs - (before + Date.now()) / 2) }
    },
  }
}
