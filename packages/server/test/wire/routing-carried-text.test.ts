/** A task's payload reaches the router with the text it came with, and keys compare that text. */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { type NatsServer, startNats } from '../../../spillway/test/setup/nats.js'
import { decide, hand, type Stranger, stranger, subject, unhurried } from '../routing-input-calls.js'
import { type Answer, endAll, finishes, type ServerProcess, startServer, until } from '../server-process.js'

const odd = '{"id":9007199254740993,"neg0":-0,"dec":1.10,"exp":1E2,"a":1,"a":2,"0":"z"}'

const task = (payload: string, { request = randomUUID(), tenant = randomUUID() as string, more = '' } = {}): string =>
  `{"version":"1", "request_id":"${request}","tenant_id":"${tenant}","task":{"type":"chat","payload":${payload}}${more}}`

let nats: NatsServer
let eve: Stranger
const databases: TestDatabase[] = []
/** Whatever is published for the routers. */
const seen: string[] = []

beforeAll(async () => {
  nats = await startNats()
  eve = await stranger(nats.url)
  eve.nc.subscribe(subject, { callback: (_, message) => void seen.push(message.string()) })
  await eve.nc.flush()
})
afterAll(async () => {
  await endAll()
  await eve.close()
  await nats.stop()
  await Promise.all(databases.map((database) => database.drop()))
})

async function start(env: Record<string, string>): Promise<ServerProcess> {
  const database = await freshDatabase()
  databases.push(database)
  return startServer({ ...unhurried, DATABASE_URL: database.url, ...env })
}

describe.each(['with a broker', 'without a broker'] as const)('%s', (way) => {
  let server: ServerProcess
  beforeAll(async () => {
    server = await start(way === 'with a broker' ? { NATS_URL: nats.url } : {})
  })
  afterAll(() => server.kill())

  const finalStatus = async (answer: Answer): Promise<number> => {
    if (answer.status !== 202) return answer.status
    const done = await finishes(server, answer.body.operationId)
    return done.status === 'completed' ? 200 : 422
  }

  it.runIf(way === 'with a broker')('publishes the task as it came', async () => {
    for (const send of [decide, hand]) {
      const request = randomUUID()
      const text = task(odd, { request })
      const answer = await send(server, text)
      expect(answer.status, answer.text).toBeLessThan(300)
      const published = await until('it is published', () => seen.find((each) => each.includes(request)))
      expect(published).toBe(text)
    }
  })

  it.each([
    ['decide', decide],
    ['messages', hand],
  ])('a key of the request is for one text: %s', async (_, send) => {
    const key = { 'idempotency-key': randomUUID() }
    const of = { request: randomUUID(), tenant: randomUUID() }
    const first = await send(server, task('9007199254740992', of), key)
    expect(first.status, first.text).toBeLessThan(300)
    expect(await finalStatus(await send(server, task('9007199254740993', of), key))).toBeOneOf([409, 422])
    const again = await send(server, task('9007199254740992', of), key)
    expect([again.status, again.headers.get('idempotent-replayed')]).toEqual([first.status, 'true'])
  })

  it.each([
    ['decide', decide],
    ['messages', hand],
  ])('a key in the body is for one text: %s', async (_, send) => {
    const of = { tenant: randomUUID(), more: `,"idempotency_key":"${randomUUID()}"` }
    const first = await send(server, task('9007199254740992', of))
    expect(first.status, first.text).toBeLessThan(300)
    expect(await finalStatus(await send(server, task('9007199254740993', of)))).toBeOneOf([409, 422])
    expect(await finalStatus(await send(server, task('9007199254740992', of)))).toBe(200)
  })
})
