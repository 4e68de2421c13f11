/** A broker, a database, and servers on them that a test may kill; and load whose every answer is kept. */

import { freshDatabase, type TestDatabase } from '../../spillway/test/setup/database.js'
import { type NatsServer, startNats } from '../../spillway/test/setup/nats.js'
import { routeTask, unhurried } from './routing-input-calls.js'
import { type Answer, call, type Env, get, type ServerProcess, sample, startServer } from './server-process.js'

/** Limits and waits out of the way: these tests are about what breaks. */
export const patient: Env = {
  ...unhurried,
  GATEWAY_RATE_LIMIT_ROUTES_DECIDE_LIMIT: '1000000',
  GATEWAY_RATE_LIMIT_MESSAGES_LIMIT: '1000000',
  SPILLWAY_RETRY_BASE_MS: '100',
  SPILLWAY_RETRY_MAX_MS: '1000',
}

export interface Parts {
  readonly nats: NatsServer
  readonly database: TestDatabase
  readonly env: Env
  start(env?: Env): Promise<ServerProcess>
  /** A gateway that works on the queue, and routers apart from it. */
  fleet(routers: number, env?: Env): Promise<{ gateway: ServerProcess; routers: ServerProcess[] }>
  close(): Promise<void>
}

export async function openParts(own: Env = {}): Promise<Parts> {
  const nats = await startNats()
  const database = await freshDatabase()
  const env = { ...patient, DATABASE_URL: database.url, NATS_URL: nats.url, ...own }
  const started: ServerProcess[] = []
  const start = async (more: Env = {}): Promise<ServerProcess> => {
    const server = await startServer({ ...env, ...more })
    started.push(server)
    return server
  }
  return {
    nats,
    database,
    env,
    start,
    fleet: async (count, more = {}) => {
      const routers = await Promise.all(
        Array.from({ length: count }, () => start({ ...more, SPILLWAY_ROLES: 'router' })),
      )
      const urls = routers.map(({ origin }) => `${origin}/metrics`).join(',')
      const gateway = await start({
        ...{ SPILLWAY_ROLES: 'gateway,worker', GATEWAY_ROUTER_METRICS_URL: urls },
        ...more,
      })
      return { gateway, routers }
    },
    close: async () => {
      await Promise.all(started.map((server) => server.kill()))
      await nats.stop()
      await database.drop()
    },
  }
}

export interface Load {
  readonly answers: Answer[]
  /** Ends each caller after the answer it waits for. */
  stop(): Promise<Answer[]>
}

/** So many callers, each with the next task as soon as the one before is answered. */
export function load(server: { origin: string }, path: string, callers: number): Load {
  const answers: Answer[] = []
  let isOver = false
  const all = Array.from({ length: callers }, async () => {
    while (!isOver) answers.push(await call(server, 'POST', path, { body: routeTask(), timeoutMs: 45_000 }))
  })
  return {
    answers,
    stop: async () => {
      isOver = true
      await Promise.all(all)
      return answers
    },
  }
}

export const countOf = (answers: readonly Answer[], status: number): number =>
  answers.filter((answer) => answer.status === status).length

/** What is neither done nor honestly refused, with the time to come back. */
export function dishonest(answers: readonly Answer[]): string[] {
  return answers.flatMap(({ status, headers, text }) => {
    const isHonest = status < 300 || (status === 503 && Number(headers.get('retry-after')) >= 1)
    return isHonest ? [] : [`${status} ${text}`]
  })
}

export async function metric(
  server: { origin: string },
  name: string,
  labels: Record<string, string> = {},
): Promise<number | undefined> {
  return sample((await get(server, '/metrics')).text, name, labels)
}
