/** The short path answers as the framework does: each request is sent both ways and the answers compared. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  type Answer,
  call,
  endAll,
  get,
  type ServerProcess,
  startServer,
  startTarget,
  submit,
  type Target,
} from '../server-process.js'

let database: TestDatabase
let server: ServerProcess
let target: Target

beforeAll(async () => {
  database = await freshDatabase()
  target = await startTarget()
  server = await startServer({ DATABASE_URL: database.url, SPILLWAY_FORWARD_ALLOW: target.origin })
})

afterAll(async () => {
  await endAll()
  await target.close()
  await database.drop()
})

/** Quoted, the charset means the same and is not what ordinary callers send. */
const unusual = 'application/json; charset="utf-8"'
const ordinary = 'application/json'

const own = /[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32}/g

/** Without what differs between any two answers. */
function comparable({ status, headers, body }: Answer) {
  const { estimatedWaitSeconds: _, queuePosition: __, result: ___, ...members } = body
  const kept = [...headers].filter(([name]) => !['date', 'content-length', 'connection', 'keep-alive'].includes(name))
  return JSON.parse(JSON.stringify({ status, headers: kept, members }).replaceAll(own, 'id')) as unknown
}

const order = (more: object = {}) => ({
  type: 'http.request',
  queue: 'q',
  payload: { url: `${target.origin}/x`, body: { a: 'ä' } },
  ...more,
})

const requests: [name: string, headers: Record<string, string>, body: () => unknown][] = [
  ['run now', {}, () => order({ partition: 'now' })],
  ['queued', { prefer: 'respond-async' }, () => order({ partition: 'later' })],
  ['waited for', { prefer: 'respond-async, wait=5' }, () => order({ partition: 'waited' })],
  ['a named identity', { 'x-user-id': 'ada' }, () => order({ partition: 'ada' })],
  ['a bad identity', { 'x-user-id': 'x'.repeat(1_000) }, () => order()],
  ['its trace', { traceparent: `00-${'4'.repeat(32)}-${'5'.repeat(16)}-01` }, () => order({ partition: 'trace' })],
  ['a body that is no JSON', {}, () => '{"type":'],
  ['a body that is not UTF-8 text', {}, () => '{"a":"\\ud800"}'],
  ['a body of the wrong shape', {}, () => ({ type: 'http.request' })],
  ['an unknown member', {}, () => order({ colour: 'blue' })],
  ['another type', {}, () => order({ type: 'other' })],
  ['a target that is not allowed', {}, () => order({ payload: { url: 'http://127.0.0.1:1/' } })],
  ['an empty key', { 'idempotency-key': '' }, () => order()],
  ['a key that is too long', { 'idempotency-key': 'k'.repeat(300) }, () => order()],
  [
    'a body that is too large',
    {},
    () => order({ payload: { url: `${target.origin}/x`, body: 'x'.repeat(1_100_000) } }),
  ],
  [
    'a large body',
    {},
    () => order({ partition: 'large', payload: { url: `${target.origin}/x`, body: 'x'.repeat(900_000) } }),
  ],
]

describe('the same answer by both ways', () => {
  it.each(requests)('%s', async (_, headers, body) => {
    const send = (type: string) =>
      call(server, 'POST', '/api/v1/operations', { body: body(), headers: { ...headers, 'content-type': type } })
    const short = await send(ordinary)
    const long = await send(unusual)
    expect(comparable(short)).toEqual(comparable(long))
  })

  it('and a key used on one is known on the other', async () => {
    const headers = { 'idempotency-key': 'both', prefer: 'respond-async' }
    const first = await submit(server, `${target.origin}/k`, {}, headers)
    const second = await submit(server, `${target.origin}/k`, {}, { ...headers, 'content-type': unusual })
    expect(second.body.operationId).toBe(first.body.operationId)
    expect(second.headers.get('idempotent-replayed')).toBe('true')
  })

  it('and both are counted alike', async () => {
    const counted = async () => {
      const text = (await get(server, '/metrics')).text
      const line = 'spillway_http_requests_total{route="/api/v1/operations",method="POST",status="202"}'
      return Number(
        text
          .split('\n')
          .find((l) => l.startsWith(line))
          ?.slice(line.length) ?? 0,
      )
    }
    const before = await counted()
    for (const type of [ordinary, unusual]) {
      const { status } = await submit(
        server,
        `${target.origin}/m`,
        {},
        { prefer: 'respond-async', 'content-type': type },
      )
      expect(status).toBe(202)
    }
    expect(await counted()).toBe(before + 2)
  })
})
