/** Routers that fall, end, and meet messages that they cannot work on: each message is answered or dead-lettered. */
import { nanos } from '@nats-io/transport-node'
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { openTables, type Tables } from '../petition-calls.js'
import { dishonest, load, metric, openParts, type Parts } from '../routing-faults-fleet.js'
import {
  bytesOf,
  consumer,
  deadLetters,
  deadLettersPath,
  decide,
  decided,
  decidePath,
  decisionForm,
  died,
  expectRefused,
  hand,
  routeTask,
  type Stranger,
  stranger,
  stream,
} from '../routing-input-calls.js'
import { endAll, finishes, get, post, type ServerProcess, startServer, submit, until } from '../server-process.js'

let parts: Parts
let outside: Stranger
let tables: Tables

beforeAll(async () => {
  parts = await openParts({ ROUTER_MAX_DELIVER: '2' })
  outside = await stranger(parts.nats.url)
  tables = openTables(parts.database.url)
})

afterAll(async () => {
  await tables.close()
  await outside.close()
  await endAll()
  await parts.close()
})

const inFlight = async (server: ServerProcess) => (await metric(server, 'router_intake_inflight_messages')) ?? 0
const delivered = async (server: ServerProcess) =>
  (await metric(server, 'router_jetstream_delivered_messages_total')) ?? 0
const sumOf = async (servers: readonly ServerProcess[], name: string, labels: Record<string, string>) =>
  (await Promise.all(servers.map((server) => metric(server, name, labels)))).reduce<number>(
    (sum, value) => sum + (value ?? 0),
    0,
  )
const published = (tasks: readonly unknown[]) => Promise.all(tasks.map((task) => outside.publish(bytesOf(task))))
const tasksOf = (count: number) => Array.from({ length: count }, () => routeTask())

describe('several routers', () => {
  let gateway: ServerProcess
  let routers: ServerProcess[]

  /** Slow enough to be met while they work; twelve at once, so that none can take all. */
  const startSlow = async () => {
    const fleet = await parts.fleet(2, { ROUTER_SIMULATE_DELAY_MS: '700', ROUTER_CONCURRENCY: '12' })
    gateway = fleet.gateway
    routers = fleet.routers
  }
  const fallen = new Set<ServerProcess>()
  const first = () => routers[0] as ServerProcess
  const second = () => routers[1] as ServerProcess

  afterEach(() => Promise.all([gateway, ...routers].map((server) => server.kill())))

  it('share the work', async () => {
    await startSlow()
    const tasks = tasksOf(60)
    await published(tasks)
    await outside.settled(30_000)
    const counts = await Promise.all(routers.map(delivered))
    expect(Math.min(...counts)).toBeGreaterThan(5)
    expect(counts.reduce((sum, count) => sum + count, 0)).toBe(60)
    for (const { request_id } of tasks) expect((await decided(gateway, request_id)).ok).toBe(true)
  }, 60_000)

  it('one killed in the middle of messages: the other answers them', async () => {
    await startSlow()
    // As long as a router may be silent; 30 s by default.
    await outside.jsm.consumers.update(stream, consumer, { ack_wait: nanos(2_000) })
    const asked = Promise.all(tasksOf(20).map((task) => decide(gateway, task)))
    const accepted = Promise.all(tasksOf(10).map((task) => hand(gateway, task)))
    await until('both are at work', async () => (await inFlight(first())) > 0 && (await inFlight(second())) > 0)
    await first().kill()
    expect((await asked).map(({ status }) => status)).toEqual(Array(20).fill(200))
    for (const { body } of await accepted) {
      expect(await finishes(gateway, body.operationId)).toMatchObject({ status: 'completed', result: { ok: true } })
    }
    await outside.settled()
    expect(await metric(second(), 'router_jetstream_redelivered_messages_total')).toBeGreaterThan(0)
    expect(await deadLetters(gateway)).toEqual([])
  }, 60_000)

  it('one ended with SIGTERM under load: it answers its requests, and nothing is lost', async () => {
    await startSlow()
    const running = load(gateway, decidePath, 16)
    const tasks = tasksOf(30)
    await published(tasks)
    await until('both are at work', async () => (await inFlight(first())) > 3 && (await inFlight(second())) > 3)
    const began = performance.now()
    expect(await first().stop()).toEqual({ code: 0, signal: null })
    expect(performance.now() - began).toBeLessThan(10_000)
    const answers = await running.stop()
    expect(answers.map(({ status, text }) => `${status} ${status === 200 ? '' : text}`)).toEqual(
      Array(answers.length).fill('200 '),
    )
    for (const { request_id } of tasks) expect((await decided(gateway, request_id)).ok).toBe(true)
    await outside.settled()
    expect(await deadLetters(gateway)).toEqual([])
  }, 60_000)

  it('both killed: messages published meanwhile wait for the next one', async () => {
    await startSlow()
    await Promise.all(routers.map((router) => router.kill()))
    const accepted = await hand(gateway, routeTask())
    const task = routeTask()
    await outside.publish(bytesOf(task))
    const next = await parts.start({ SPILLWAY_ROLES: 'router' })
    expect((await decided(gateway, task.request_id)).decision).toMatchObject(decisionForm)
    expect(await finishes(gateway, accepted.body.operationId)).toMatchObject({ status: 'completed' })
    await next.kill()
  }, 60_000)

  it('killed one after the other by one message: the third does not get it; it becomes a complete dead letter', async () => {
    const fleet = await parts.fleet(3, { ROUTER_SIMULATE_DELAY_MS: '60000' })
    gateway = fleet.gateway
    routers = fleet.routers
    await outside.jsm.consumers.update(stream, consumer, { ack_wait: nanos(3_000) })
    const data = bytesOf(routeTask())
    await outside.publish(data)
    for (const nth of ['first', 'second']) {
      const holder = await until(`a router has it, the ${nth}`, async () => {
        for (const router of routers) if (!fallen.has(router) && (await inFlight(router)) > 0) return router
        return null
      })
      fallen.add(holder)
      await holder.kill()
    }
    expect(await died(gateway, data)).toMatchObject({ reason: 'max_deliver', deliveries: 2 })
    await outside.settled()
    const third = routers.find((router) => !fallen.has(router)) as ServerProcess
    expect(await delivered(third)).toBe(0)
    // By the one of the two that found it.
    const left = [gateway, third]
    const dead = { reason: 'max_deliver' }
    expect(await sumOf(left, 'router_intake_dead_letters_total', dead)).toBe(1)
    expect(await sumOf(left, 'router_intake_processing_latency_seconds_count', { status: 'exhausted' })).toBe(1)
  }, 60_000)

  it('killed by the message of a ticket: the ticket fails and names the dead letter, until it is redriven', async () => {
    const fleet = await parts.fleet(2, { ROUTER_SIMULATE_DELAY_MS: '60000', ROUTER_MAX_DELIVER: '1' })
    gateway = fleet.gateway
    routers = fleet.routers
    await outside.jsm.consumers.update(stream, consumer, { ack_wait: nanos(2_000) })
    const { body } = await hand(gateway, routeTask())
    const holder = await until('a router has it', async () => {
      for (const router of routers) if ((await inFlight(router)) > 0) return router
      return null
    })
    await holder.kill()
    const letter = await until('it is dead-lettered', async () =>
      (await deadLetters(gateway)).find(({ headers }) => headers['Spillway-Ticket'] === body.operationId),
    )
    const ticket = await finishes(gateway, body.operationId)
    expect(ticket.status).toBe('failed')
    expect(ticket.error_message).toContain(`dead letter ${letter.id} `)
    await Promise.all(routers.map((router) => router.kill()))
    routers = [await parts.start({ SPILLWAY_ROLES: 'router', ROUTER_MAX_DELIVER: '1' })]
    // Until then the broker drops a second message with the id of the ticket; two minutes by default.
    await outside.jsm.streams.update(stream, { duplicate_window: nanos(1_000) })
    await post(gateway, '/api/v1/dead-letters/redrive', { ids: [body.operationId] })
    expect(await finishes(gateway, body.operationId)).toMatchObject({ status: 'completed', result: { ok: true } })
  }, 60_000)
})

/** What a router reads or writes is not there meanwhile. */
async function withoutTable(name: string, work: () => Promise<void>): Promise<void> {
  await tables.query(`ALTER TABLE ${name} RENAME TO ${name.replace(/^.*\./, '')}_away`)
  try {
    await work()
  } finally {
    await tables.query(`ALTER TABLE ${name}_away RENAME TO ${name.replace(/^.*\./, '')}`)
  }
}

describe('a router that starts', () => {
  const isUnloaded = (server: ServerProcess) =>
    until('its policies could not be read', () => server.stdout().includes('cannot read changes of policies'))

  it('takes no message before its policies are loaded, and spends no delivery on it', async () => {
    const gateway = await parts.start({ SPILLWAY_ROLES: 'gateway,worker', ROUTER_MAX_DELIVER: '1' })
    const { body } = await hand(gateway, routeTask())
    const before = await until('it is published', async () => {
      const { state } = await outside.jsm.streams.info(stream)
      return state.messages > 0 && { deliveries: await outside.deliveries() }
    })
    await withoutTable('rt_state', async () => {
      const router = await parts.start({ SPILLWAY_ROLES: 'router', ROUTER_MAX_DELIVER: '1' })
      await isUnloaded(router)
      await until('the broker is asked for its backlog', async () =>
        metric(router, 'router_jetstream_pending_messages'),
      )
      expect(await outside.deliveries()).toBe(before.deliveries)
    })
    expect(await finishes(gateway, body.operationId)).toMatchObject({ status: 'completed' })
    await endAll()
  }, 60_000)

  it('claims nothing of the queue before that, where the queue is the intake', async () => {
    const { NATS_URL: _, ...rest } = parts.env
    const env = { ...rest, SPILLWAY_DB_SCHEMA: 'starting', ROUTER_MAX_DELIVER: '1' }
    const gateway = await startServer({ ...env, SPILLWAY_ROLES: 'gateway' })
    const { body } = await hand(gateway, routeTask())
    await withoutTable('starting.rt_state', async () => {
      const worker = await startServer({ ...env, SPILLWAY_ROLES: 'worker' })
      await isUnloaded(worker)
      // Behind it in the queue, and of a type that needs no policies.
      const later = await submit(gateway, `${gateway.origin}/demo/echo`)
      expect((await finishes(gateway, later.body.operationId)).status).toBe('completed')
      const path = `/api/v1/operations/${body.operationId}`
      expect((await get(gateway, path)).body).toMatchObject({ status: 'pending', attempt: 0 })
    })
    expect(await finishes(gateway, body.operationId)).toMatchObject({ status: 'completed', attempt: 1 })
    await endAll()
  }, 60_000)
})

describe('a message that fails every time', () => {
  let server: ServerProcess

  beforeAll(async () => {
    server = await parts.start()
  })

  it('becomes a complete dead letter after its last attempt, and can be redriven', async () => {
    const task = routeTask({ idempotency_key: 'poison' })
    const data = bytesOf(task)
    const before = await outside.deliveries()
    await withoutTable('rt_keys', async () => {
      await outside.publish(data)
      expect(await died(server, data)).toMatchObject({ reason: 'max_deliver', deliveries: 2 })
      await outside.settled()
    })
    expect((await outside.deliveries()) - before).toBe(2)
    const { id } = await died(server, data)
    await post(server, `${deadLettersPath}/redrive`, { ids: [id] })
    expect((await decided(server, task.request_id)).decision).toMatchObject(decisionForm)
  })

  it('is answered to its waiting caller, and dead-lettered', async () => {
    const data = bytesOf(routeTask({ idempotency_key: 'poison' }))
    await withoutTable('rt_keys', async () => {
      expect(await outside.ask(data)).toMatchObject({ ok: false, error: { code: 'internal_error' } })
    })
    expect((await died(server, data)).reason).toBe('max_deliver')
  })

  it('is a 500 for the caller of decide', async () => {
    await withoutTable('rt_keys', async () => {
      const answer = await decide(server, routeTask({ idempotency_key: 'poison' }))
      expectRefused(answer, 500, 'internal_error')
      expect(answer.text).not.toMatch(/rt_keys|relation|SELECT/)
    })
  })

  it('is a 503 for the caller of decide while the database is not reachable, and no dead letter', async () => {
    const letters = (await deadLetters(server)).length
    await tables.query('BEGIN')
    await tables.query('LOCK TABLE rt_keys')
    const answer = await decide(server, routeTask({ idempotency_key: 'later' }))
    await tables.query('ROLLBACK')
    expectRefused(answer, 503, 'store_unavailable')
    expect(Number(answer.headers.get('retry-after'))).toBeGreaterThanOrEqual(5)
    await outside.settled()
    expect(await deadLetters(server)).toHaveLength(letters)
  })

  it('is a failed ticket, with its dead letter', async () => {
    await withoutTable('rt_keys', async () => {
      const { body } = await hand(server, routeTask({ idempotency_key: 'poison' }))
      expect((await finishes(server, body.operationId)).status).toBe('failed')
      const letters = (await get(server, '/api/v1/dead-letters')).body.items
      expect(letters.map(({ id }) => id)).toContain(body.operationId)
    })
  })

  it('is not lost without a waiting caller when the decision cannot be stored', async () => {
    const data = bytesOf(routeTask())
    await withoutTable('rt_decisions', async () => {
      await outside.publish(data)
      await outside.settled()
      expect((await died(server, data, 3_000)).reason).toBe('max_deliver')
    })
  })

  it('is a 500 without a broker, too', async () => {
    const { NATS_URL: _, ...env } = parts.env
    const alone = await startServer({ ...env, SPILLWAY_DB_SCHEMA: 'alone', ROUTER_MAX_DELIVER: '1' })
    await tables.query('ALTER TABLE alone.rt_keys RENAME TO rt_keys_away')
    expectRefused(await decide(alone, routeTask({ idempotency_key: 'poison' })), 500, 'internal_error')
    await alone.kill()
  })

  it('does not keep others waiting', async () => {
    await withoutTable('rt_keys', async () => {
      await published(Array.from({ length: 20 }, () => routeTask({ idempotency_key: 'poison' })))
      const answers = await Promise.all(tasksOf(20).map((task) => decide(server, task)))
      expect(dishonest(answers)).toEqual([])
      expect(Math.max(...answers.map(({ ms }) => ms))).toBeLessThan(5_000)
      await outside.settled()
    })
  })
})
