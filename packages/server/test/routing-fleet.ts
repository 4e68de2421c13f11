/**
 * A gateway and two routers as processes of their own on one database, with a NATS server and a receiver of alerts; or,
 * without NATS, a gateway and two workers. Nothing here knows the source: all is seen over the wire.
 */
import { createHmac, randomUUID } from 'node:crypto'
import { type JetStreamManager, jetstream, jetstreamManager } from '@nats-io/jetstream'
import { connect, createInbox, headers, type NatsConnection } from '@nats-io/transport-node'
import { type NatsServer, startNats } from '../../spillway/test/setup/nats.js'
import { type Call, type Env, type ServerProcess, startServer, startTarget, until } from './server-process.js'

export const subject = 'beamline.router.v1.decide'
const secret = 'known to both sides'

/** A machine that is short of CPU must not read as a busy store, which is refused with 503. */
const patient: Env = { SPILLWAY_STORE_TIMEOUT_MS: '20000', SPILLWAY_ACCEPT_WAIT_BUDGET_MS: '60000' }

export interface FleetOptions {
  /** Migrated already: else all of them would want to do it. */
  databaseUrl: string
  /** False: the operation queue is the intake, and its workers are the routers. */
  nats: boolean
  /** Of all processes. */
  env?: Env
  /** Of each router. */
  routers: readonly Env[]
}

export interface Notice {
  name: string
  status: string
  severity: string
  labels: Record<string, string>
  annotations: Record<string, unknown>
  at: number
  isSigned: boolean
}

/** What a stranger sees of the broker, and does with it. */
export interface Stranger {
  /** Resolves when the broker has stored it. With `answered` it asks for an answer at the inbox that `onAnswer` hears. */
  publish(task: object, options: { answered: boolean }): Promise<void>
  /** Pending and handed out. */
  backlog(): Promise<number>
  /** What lies in the stream of tasks. */
  stored(): Promise<number>
}

export interface RoutingFleet {
  readonly gateway: ServerProcess
  readonly routers: readonly ServerProcess[]
  /** Those whose metrics tell of the intake: the routers, and without NATS every process. */
  readonly intakes: Readonly<Record<string, ServerProcess>>
  readonly all: Readonly<Record<string, ServerProcess>>
  readonly stranger: Stranger | null
  /** Alerts, in the order in which they came in. */
  notices(): Notice[]
  close(): Promise<void>
}

/** Without the members that a check changes. */
export function task(members: Record<string, unknown> = {}) {
  const id = randomUUID()
  return {
    ...{ version: '1', request_id: id, tenant_id: `tenant-${id}`, task: { type: 'chat', payload: { text: 'Hello' } } },
    ...members,
  }
}

/** Ends what was started, last first, when the rest cannot be. */
export async function startRoutingFleet(
  options: FleetOptions,
  onAnswer: (answer: Record<string, unknown>) => void = () => undefined,
): Promise<RoutingFleet> {
  const ends: (() => Promise<unknown>)[] = []
  const close = async (): Promise<void> => {
    for (const end of ends.splice(0).reverse()) await end()
  }
  try {
    return { ...(await startIn(options, onAnswer, ends)), close }
  } catch (fault) {
    await close()
    throw fault
  }
}

async function startIn(
  { databaseUrl, nats: hasNats, env = {}, routers: routerEnvs }: FleetOptions,
  onAnswer: (answer: Record<string, unknown>) => void,
  ends: (() => Promise<unknown>)[],
): Promise<Omit<RoutingFleet, 'close'>> {
  const receiver = await startTarget()
  ends.push(receiver.close)
  const nats = hasNats ? await startNats() : null
  if (nats !== null) ends.push(nats.stop)
  const shared: Env = {
    ...{ DATABASE_URL: databaseUrl, ...patient, ...env },
    ...{ ALERT_WEBHOOK_URL: `${receiver.origin}/alerts`, ALERT_WEBHOOK_SECRET: secret },
    ...(nats !== null && { NATS_URL: nats.url }),
  }
  const start = async (own: Env): Promise<ServerProcess> => {
    const server = await startServer({ ...shared, ...own })
    ends.push(server.kill)
    return server
  }
  const router = nats === null ? 'worker' : 'router'
  const routers = await Promise.all(routerEnvs.map((own) => start({ SPILLWAY_ROLES: router, ...own })))
  const urls = routers.map(({ origin }) => `${origin}/_metrics`).join(',')
  const gateway = await start(
    nats === null
      ? { SPILLWAY_ROLES: 'gateway' }
      : { SPILLWAY_ROLES: 'gateway,worker', GATEWAY_ROUTER_METRICS_URL: urls },
  )
  const byName = Object.fromEntries(routers.map((server, i) => [`${router}-${i + 1}`, server]))
  const stranger = nats === null ? null : await meetBroker(nats, onAnswer, ends)
  return {
    ...{ gateway, routers, stranger },
    all: { gateway, ...byName },
    intakes: nats === null ? { gateway, ...byName } : byName,
    notices: () => receiver.calls.map(noticeOf),
  }
}

function noticeOf({ body, headers: got, at }: Call): Notice {
  const said = JSON.parse(body) as Record<string, unknown>
  const signature = `sha256=${createHmac('sha256', secret).update(body).digest('hex')}`
  return {
    name: String(said.alert_name),
    status: String(said.status),
    severity: String(said.severity),
    labels: said.labels as Record<string, string>,
    annotations: said.annotations as Record<string, unknown>,
    at,
    isSigned: got['x-spillway-signature'] === signature,
  }
}

async function meetBroker(
  nats: NatsServer,
  onAnswer: (answer: Record<string, unknown>) => void,
  ends: (() => Promise<unknown>)[],
): Promise<Stranger> {
  const nc: NatsConnection = await connect({ servers: [`127.0.0.1:${nats.port}`] })
  ends.push(() => nc.close())
  const inbox = createInbox()
  nc.subscribe(inbox, {
    callback: (fault, message) => {
      if (fault !== null) throw fault
      onAnswer(message.json<Record<string, unknown>>())
    },
  })
  const js = jetstream(nc)
  const jsm: JetStreamManager = await jetstreamManager(nc)
  const stream = await until('the stream of tasks', () => jsm.streams.find(subject).catch(() => null))
  const consumer = await until('the consumer of tasks', async () => (await jsm.consumers.list(stream).next())[0]?.name)
  return {
    publish: async (message, { answered }) => {
      const head = headers()
      if (answered) head.set('Spillway-Reply-To', inbox)
      await js.publish(subject, JSON.stringify(message), { headers: head })
    },
    backlog: async () => {
      const { num_pending: pending, num_ack_pending: handedOut } = await jsm.consumers.info(stream, consumer)
      return pending + handedOut
    },
    stored: async () => (await jsm.streams.info(stream)).state.messages,
  }
}
