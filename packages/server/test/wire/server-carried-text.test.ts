/**
 * Payloads that the server only carries leave with the text they came with: numbers beyond 2^53, -0, long decimals, member
 * order and repeated names. Idempotency compares that text.
 */
import { randomBytes, randomUUID } from 'node:crypto'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { ack, configure, drained, later, pauseLane, pop, resumeLane, take } from '../message-calls.js'
import { type Fleet, startFleet } from '../petitions-fleet.js'
import {
  type Answer,
  call,
  finishes,
  get,
  post,
  type ServerProcess,
  startTarget,
  type Target,
  until,
} from '../server-process.js'

/** Nothing of it survives JSON.parse and JSON.stringify. */
const odd =
  '{"id":9007199254740993,"big":123456789012345678901234567890,"neg0":-0,"dec":1.10,"exp":1E2,"a":1,"a":2,"0":"z","\\u0061":[ 1.0,\n\t{"b":0.1000000000000000055511151231257827} ]}'

let fleet: Fleet
let server: ServerProcess
let target: Target
let upstream: Target
let status = 200

const completion =
  '{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}'
const chunk =
  '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}'

beforeAll(async () => {
  target = await startTarget((_, response) => void response.writeHead(status).end())
  upstream = await startTarget(({ headers }, response) => {
    const isStream = headers.accept === 'text/event-stream'
    response.writeHead(200, { 'content-type': isStream ? 'text/event-stream' : 'application/json' })
    response.end(isStream ? `data: ${chunk}\n\ndata: [DONE]\n\n` : completion)
  })
  fleet = await startFleet({
    instances: 0,
    env: {
      SPILLWAY_RETRY_BASE_MS: '10',
      SPILLWAY_RETRY_MAX_MS: '20',
      SPILLWAY_FORWARD_ALLOW: target.origin,
      SPILLWAY_ENCRYPTION_KEY: randomBytes(32).toString('hex'),
      GENERATION_UPSTREAM_URL: `${upstream.origin}/v1`,
    },
  })
  server = await fleet.start()
})
afterAll(async () => {
  await fleet.close()
  await Promise.all([target.close(), upstream.close()])
})

const pushText = (queue: string, payload = odd, headers: Record<string, string> = {}) =>
  post(server, '/api/v1/push', `{"items":[{"queue":"${queue}","payload":${payload}}]}`, headers)

/** A query, which the short path leaves to the framework. */
const pushLongWay = (queue: string) =>
  post(server, '/api/v1/push?long=1', `{"items":[{"queue":"${queue}","payload":${odd}}]}`)

async function popped(queue: string): Promise<string> {
  const answer = await until(`a message of ${queue}`, async () => {
    const given = await pop(server, queue, { autoAck: true })
    return given.status === 200 && given
  })
  return answer.text
}

describe('push', () => {
  it.each([
    ['the short path', pushText],
    ['the framework', pushLongWay],
  ])('carries the text to pop, by %s', async (_, send) => {
    const queue = randomUUID()
    expect((await send(queue)).status).toBe(201)
    expect(await popped(queue)).toContain(`"data":${odd}`)
  })

  it('finds the payload whatever the request looks like', async () => {
    const queue = randomUUID()
    const body = ` { "items" : 1 , "it\\u0065ms" : [ { "payload":7, "p\\u0061yload" : ${odd} , "queue":"${queue}" } , {"queue":"${queue}","payload":null} ,{"queue":"${queue}","payload":"a\\"}]\\\\"} ]\n}`
    expect((await post(server, '/api/v1/push', body)).status).toBe(201)
    const { text } = await pop(server, queue, { autoAck: true, batch: 10 })
    expect(text).toContain(`"data":${odd},`)
    expect(text).toContain('"data":null,')
    expect(text).toContain('"data":"a\\"}]\\\\",')
  })

  it('carries it through the operation queue', async () => {
    const queue = randomUUID()
    const answer = await pushText(queue, odd, later)
    expect(answer.status).toBe(202)
    await drained(server, answer)
    expect(await popped(queue)).toContain(`"data":${odd}`)
  })

  it('carries it through an encrypted queue', async () => {
    const queue = randomUUID()
    await configure(server, queue, { encryptionEnabled: true })
    expect((await pushText(queue)).status).toBe(201)
    const queued = await pushText(queue, odd, later)
    await drained(server, queued)
    expect(await popped(queue)).toContain(`"data":${odd}`)
    expect(await popped(queue)).toContain(`"data":${odd}`)
  })

  it('stores pushes that were queued before their queue was encrypted', async () => {
    const queue = randomUUID()
    await pauseLane(server, queue)
    const queued = await pushText(queue, odd, later)
    expect(queued.status).toBe(202)
    await configure(server, queue, { encryptionEnabled: true })
    await resumeLane(server, queue)
    await drained(server, queued)
    const [row] = await fleet.sql<{ sealed: boolean }>(
      'SELECT m.sealed FROM spillway.mq_messages m JOIN spillway.mq_partitions p ON p.id = m.partition JOIN spillway.mq_queues q ON q.id = p.queue WHERE q.name = $1',
      [queue],
    )
    expect(row?.sealed).toBe(true)
    expect(await popped(queue)).toContain(`"data":${odd}`)
  })

  it('carries it in a transaction', async () => {
    const queue = randomUUID()
    const answer = await post(
      server,
      '/api/v1/transaction',
      `{"operations":[{"type":"push","items":[{"queue":"${queue}","payload":${odd}}]}]}`,
    )
    expect(answer.body).toMatchObject({ success: true })
    expect(await popped(queue)).toContain(`"data":${odd}`)
  })

  it('returns it in the log, in the dead letters, and after a replay', async () => {
    const queue = randomUUID()
    await configure(server, queue, { deadLetterQueue: true })
    await pushText(queue)
    const [message] = await take(server, queue)
    if (message === undefined) throw new Error('there is no message')
    const { partitionId, transactionId } = message
    const single = await get(server, `/api/v1/messages/${partitionId}/${transactionId}`)
    expect(single.text).toContain(odd)
    const event = `{"partitionId":"${partitionId}","transactionId":"${transactionId}","data":${odd}}`
    expect((await post(server, '/api/v1/traces', event)).status).toBe(201)
    const traces = await get(server, `/api/v1/traces/${partitionId}/${transactionId}`)
    expect(traces.text).toContain(`"data":${odd}`)
    expect(await ack(server, message, { status: 'dlq', error: 'no' })).toMatchObject({ dlq: true })
    const letters = await get(server, `/api/v1/dlq?queue=${queue}`)
    expect(letters.text).toContain(`"data":${odd}`)
    const [letter] = letters.body.messages as { id: string }[]
    expect((await post(server, `/api/v1/dlq/${letter?.id}/replay`)).status).toBe(200)
    expect(await popped(queue)).toContain(`"data":${odd}`)
  })
})

describe('http.request', () => {
  const order = (queue: string, rest: string) =>
    post(server, '/api/v1/operations', `{"type":"http.request","queue":"${queue}",${rest}}`)

  it.each([
    ['at once', ''],
    ['from the queue', '"delay_seconds":0.01,'],
  ])('sends the body as it came, %s', async (_, more) => {
    const path = `/${randomUUID()}`
    const answer = await order(randomUUID(), `${more}"payload":{"url":"${target.origin}${path}","b\\u006fdy":${odd}}`)
    await finishes(server, answer.body.operationId)
    expect(target.calls.find((seen) => seen.path === path)?.body).toBe(odd)
  })

  it('sends a text as it is meant, where the caller names its type', async () => {
    const path = `/${randomUUID()}`
    const payload = `{"url":"${target.origin}${path}","headers":{"content-type":"text/plain"},"body":"a\\nb \\u00e9"}`
    const answer = await order(randomUUID(), `"payload":${payload}`)
    await finishes(server, answer.body.operationId)
    expect(target.calls.find((seen) => seen.path === path)?.body).toBe('a\nb é')
  })

  it('returns it in the dead letters, and sends it again after a redrive', async () => {
    const path = `/${randomUUID()}`
    const queue = randomUUID()
    status = 400
    const answer = await order(queue, `"payload":{"url":"${target.origin}${path}","body":${odd}}`)
    status = 200
    expect((await finishes(server, answer.body.operationId)).status).toBe('failed')
    const letters = await get(server, `/api/v1/dead-letters?queue=${queue}`)
    expect(letters.text).toContain(`"body":${odd}`)
    const redriven = await post(server, '/api/v1/dead-letters/redrive', { ids: [answer.body.operationId] })
    expect(redriven.body.moved).toBe(1)
    await until('it is called again', () => target.calls.filter((seen) => seen.path === path).length === 2)
    expect(target.calls.findLast((seen) => seen.path === path)?.body).toBe(odd)
  })
})

describe('a chat', () => {
  const chat = (marker: string, more: string, headers: Record<string, string> = {}) =>
    call(server, 'POST', '/v1/chat/completions', {
      body: `{"model":"m", "seed":9007199254740993,"messages":[{"role":"user","content":[{"type":"text","text":"${marker}","x":${odd}}]}],"tools":[{"type":"function","function":{"name":"f","parameters":${odd}}}],"unknown":${odd}${more}}`,
      headers: { 'x-user-id': marker, ...headers },
    })
  const sent = (marker: string) => upstream.calls.find(({ body }) => body.includes(marker))?.body

  it.each([
    ['whole', ',"stream":false'],
    ['streamed', ',"stream":true'],
  ])('reaches the upstream as it came, %s', async (_, more) => {
    const marker = randomUUID()
    const answer = await chat(marker, more)
    expect(answer.status, answer.text).toBe(200)
    expect(sent(marker)).toBe(
      `{"model":"m", "seed":9007199254740993,"messages":[{"role":"user","content":[{"type":"text","text":"${marker}","x":${odd}}]}],"tools":[{"type":"function","function":{"name":"f","parameters":${odd}}}],"unknown":${odd}${more}}`,
    )
  })

  it('with a member twice is sent as it was read: the last one', async () => {
    const marker = randomUUID()
    expect((await chat(marker, ',"stream":true,"str\\u0065am":false')).status).toBe(200)
    const body = sent(marker) ?? ''
    expect(body.match(/"stream"|"str\\u0065am"/g)).toHaveLength(1)
    expect(JSON.parse(body).stream).toBe(false)
    expect(body).toContain(`"unknown":${odd}`)
  })

  it('compares its text for the key', async () => {
    const marker = randomUUID()
    const key = { 'idempotency-key': marker }
    expect((await chat(marker, ',"n1":9007199254740992', key)).status).toBe(200)
    expect((await chat(marker, ',"n1":9007199254740993', key)).status).toBe(422)
    const again = await chat(marker, ',"n1":9007199254740992', key)
    expect([again.status, again.headers.get('idempotent-replayed')]).toEqual([200, 'true'])
  })
})

describe('one Idempotency-Key', () => {
  const routes: [string, (n: string, key: Record<string, string>, own: string) => Promise<Answer>][] = [
    ['push', (n, key, own) => pushText(own, n, key)],
    [
      'push, by the framework',
      (n, key, own) => post(server, '/api/v1/push?long=1', `{"items":[{"queue":"${own}","payload":${n}}]}`, key),
    ],
    [
      'transaction',
      (n, key, own) =>
        post(
          server,
          '/api/v1/transaction',
          `{"operations":[{"type":"push","items":[{"queue":"${own}","payload":${n}}]}]}`,
          key,
        ),
    ],
    [
      'http.request',
      (n, key, own) =>
        post(
          server,
          '/api/v1/operations',
          `{"type":"http.request","queue":"${own}","payload":{"url":"${target.origin}/${own}","body":${n}}}`,
          key,
        ),
    ],
    [
      'http.request, by the framework',
      (n, key, own) =>
        post(
          server,
          '/api/v1/operations?long=1',
          `{"type":"http.request","queue":"${own}","payload":{"url":"${target.origin}/${own}","body":${n}}}`,
          key,
        ),
    ],
  ]
  it.each(routes)('is for one text: %s', async (_, send) => {
    const key = { 'idempotency-key': randomUUID() }
    const own = randomUUID()
    const first = await send('9007199254740992', key, own)
    expect(first.status, first.text).toBeLessThan(300)
    expect((await send('9007199254740993', key, own)).status).toBe(422)
    const again = await send('9007199254740992', key, own)
    expect([again.status, again.headers.get('idempotent-replayed')]).toEqual([first.status, 'true'])
    expect(again.body).toEqual(first.body)
  })
})

describe('what no payload may hold is refused where a later member of the same name hides it', () => {
  it.each([
    ['a number that is not finite', '{"a":1e999,"a":1}', '/items/0/payload/a'],
    ['a NUL character', '{"a":["\\u0000"],"a":1}', '/items/0/payload/a/0'],
    ['a lone surrogate', '{"a":"\\ud800","a":1}', '/items/0/payload/a'],
    ['a lone surrogate in a name', '{"a":{"\\udc00":1},"a":1}', '/items/0/payload/a/\ufffd'],
    ['__proto__', '{"a":{"__proto__":1},"a":1}', '/items/0/payload/a/__proto__'],
    ['__proto__, escaped', '{"a":{"\\u005f_proto__":1},"a":1}', '/items/0/payload/a/__proto__'],
  ])('%s', async (_, payload, path) => {
    const answer = await pushText(randomUUID(), payload)
    expect([answer.status, answer.body.errors]).toEqual([400, [{ path, message: expect.stringMatching(/./) }]])
  })
})
