import type pg from 'pg'
import { StoreFault, toStoreFault } from './faults.js'
import { type Origin, originOf } from './origin.js'

/**
 * What is between us and the server.
 * - `direct`       nothing: a connection is a session
 * - `session`      a pooler that gives each connection its own session for as long as it lasts
 * - `transaction`  a pooler that gives each transaction any free session: no prepared statements, no SET, no LISTEN
 */
export type Reach = 'direct' | 'session' | 'transaction'

const timeoutMs = 5_000
const rounds = 4

/**
 * A server sends each connection its process id; a pooler sends one that it made up, because the pooler handles cancels.
 * Behind a pooler, two connections are watched. In session mode each keeps its process and shares it with nobody. In
 * transaction mode the process of an idle connection is the first that the next transaction gets; if the pooler rotates
 * instead, the idle connection itself finds another process when it asks again. Other users of the pool make both more
 * likely to be seen, or hide it for one round at most.
 */
export async function findReach(url: string | Origin): Promise<Reach> {
  const clients: pg.Client[] = []
  const open = async (): Promise<pg.Client> => {
    const client = originOf(url).client({
      application_name: 'spillway start',
      connectionTimeoutMillis: timeoutMs,
      query_timeout: timeoutMs,
    })
    // The current statement reports a loss.
    client.on('error', () => undefined)
    clients.push(client)
    await client.connect()
    return client
  }
  try {
    const idle = await open()
    if ((await processOf(idle)) === announced(idle)) return 'direct'
    const busy = await open()
    for (let round = 0; round < rounds; round++) {
      const seen = new Set<number>()
      // A different number of times in each round, so that it does not rotate in step with the pooler.
      for (let asked = 0; asked <= round; asked++) seen.add(await processOf(idle))
      await busy.query('BEGIN')
      const taken = await processOf(busy)
      const isShared = seen.has(taken)
      seen.add(await processOf(idle))
      await busy.query('ROLLBACK')
      if (isShared || seen.size > 1) return 'transaction'
    }
    return 'session'
  } catch (error) {
    throw toStoreFault(error)
  } finally {
    await Promise.all(clients.map((client) => client.end()))
  }
}

async function processOf(client: pg.Client): Promise<number> {
  const { rows } = await client.query<{ pid: number }>('SELECT pg_backend_pid() AS pid')
  const pid = rows[0]?.pid
  if (pid === undefined) throw new StoreFault('other')
  return pid
}

/** The driver keeps it for cancelling; its types do not name it. */
function announced(client: pg.Client): unknown {
  return 'processID' in client ? client.processID : undefined
}
