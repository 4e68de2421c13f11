/** What tests of routing say to a real server and, as a stranger, to its broker, and where they look afterwards. */
import { createHash, randomUUID } from 'node:crypto'
import { writeFile } from 'node:fs/promises'
import { type JetStreamManager, jetstream, jetstreamManager } from '@nats-io/jetstream'
import { createInbox, connect as dial, type NatsConnection, headers as newHeaders } from '@nats-io/transport-node'
import { expect } from 'vitest'
import { expectProblem } from './petition-calls.js'
import { type Answer, type Body, get, post, until } from './server-process.js'

type Server = { origin: string }
type Headers = Record<string, string>
type Members = Record<string, unknown>

export const decidePath = '/api/v1/routes/decide'
export const messagesPath = '/api/v1/messages'
export const policiesPath = '/api/v1/policies'
export const blocksPath = '/api/v1/registry/blocks'
export const deadLettersPath = '/api/v1/routes/dead-letters'
export const subject = 'beamline.router.v1.decide'
export const stream = 'SPILLWAY_ROUTER'
export const consumer = 'spillway-router'

/** A machine that is short of CPU while it runs the tests must not read as a busy store, which is refused or queued. */
export const unhurried = { SPILLWAY_ACCEPT_WAIT_BUDGET_MS: '60000', SPILLWAY_BUSY_QUEUE_ABOVE: '1' }

/** A task that is in order; of a tenant of its own, so that no test uses up another's limit. */
export const routeTask = (members: Members = {}): Members => ({
  version: '1',
  request_id: randomUUID(),
  tenant_id: `tenant-${randomUUID()}`,
  task: { type: 'chat.completion', payload_ref: 's3://bucket/object' },
  ...members,
})

/** The same with members taken away. */
export function without(task: Members, ...names: string[]): Members {
  return Object.fromEntries(Object.entries(task).filter(([name]) => !names.includes(name)))
}

/** A task of exactly so many bytes as JSON. */
export function taskOfBytes(bytes: number, members: Members = {}): Members {
  const task = routeTask(members)
  const bare = Buffer.byteLength(JSON.stringify({ ...task, task: { type: 'chat', payload: '' } }))
  return { ...task, task: { type: 'chat', payload: 'x'.repeat(bytes - bare) } }
}

export const decide = (server: Server, task: unknown, headers: Headers = {}) => post(server, decidePath, task, headers)
export const hand = (server: Server, task: unknown, headers: Headers = {}) => post(server, messagesPath, task, headers)

/** Two providers that nobody mistakes for the one that is there without a policy. */
export const policy = (members: Members = {}): Members => ({
  policy_id: `policy-${randomUUID()}`,
  providers: [
    { provider_id: 'swift', expected_latency_ms: 20, expected_cost: 4 },
    { provider_id: 'cheap', expected_latency_ms: 400, expected_cost: 1 },
  ],
  ...members,
})

export async function createdPolicy(server: Server, members: Members = {}, headers: Headers = {}): Promise<string> {
  const answer = await post(server, policiesPath, policy(members), headers)
  expect(answer.status, answer.text).toBe(201)
  return String(answer.body.policy_id)
}

/** The problem document, and beside it what clients of the router read. */
export function expectRefused(answer: Answer, status: number, code: string, errorCode: string = code): void {
  expectProblem(answer, status, code)
  expect(answer.body).toMatchObject({ ok: false, error: { code: errorCode, message: expect.stringMatching(/./) } })
}

export const decisionForm = {
  provider_id: expect.stringMatching(/./),
  priority: expect.any(Number),
  expected_latency_ms: expect.any(Number),
  expected_cost: expect.any(Number),
  reason: expect.stringMatching(/^(weighted|sticky|fallback|best_score)$/),
}

export interface Letter {
  id: string
  reason: string
  detail: string
  deliveries: number
  headers: Headers
  died_at: string
  data_base64: string
}

export async function deadLetters(server: Server, headers: Headers = {}): Promise<Letter[]> {
  const answer = await get(server, `${deadLettersPath}?limit=200`, headers)
  expect(answer.status, answer.text).toBe(200)
  const letters = answer.body.items as unknown as (Letter & { truncated?: true })[]
  const whole = (id: string) => get(server, `${deadLettersPath}/${id}`, headers)
  return Promise.all(
    letters.map(async (letter) =>
      letter.truncated === true ? ((await whole(letter.id)).body as unknown as Letter) : letter,
    ),
  )
}

/** The dead letter with exactly these bytes, once it is there. */
export const died = (server: Server, data: Uint8Array, ms?: number): Promise<Letter> =>
  until(
    'the message is dead-lettered, whole',
    async () => {
      const wanted = Buffer.from(data).toString('base64')
      return (await deadLetters(server)).find((letter) => letter.data_base64 === wanted)
    },
    ms,
  )

/** The decision of this request, once it can be read. */
export const decided = (server: Server, requestId: unknown, ms?: number): Promise<Body> =>
  until(
    `request ${String(requestId)} is decided`,
    async () => {
      const { status, body } = await get(server, `${decidePath}/${String(requestId)}`)
      return status === 200 && body
    },
    ms,
  )

/** Somebody with a connection to the broker and no knowledge of ours. */
export interface Stranger {
  readonly nc: NatsConnection
  readonly jsm: JetStreamManager
  /** Stored by the broker. */
  publish(data: Uint8Array | string, headers?: Headers): Promise<void>
  /** Published with an inbox to answer to; the answer. */
  ask(data: Uint8Array | string, headers?: Headers): Promise<Body>
  /** Waits until the broker keeps nothing: all is acked. */
  settled(ms?: number): Promise<void>
  deliveries(): Promise<number>
  close(): Promise<void>
}

export async function stranger(url: string): Promise<Stranger> {
  const nc = await dial({ servers: [new URL(url).host], maxReconnectAttempts: -1, reconnectTimeWait: 50 })
  const jsm = await jetstreamManager(nc, { checkAPI: false })
  const js = jetstream(nc)
  const info = () => jsm.consumers.info(stream, consumer)
  const publish = async (data: Uint8Array | string, headers: Headers = {}): Promise<void> => {
    const all = newHeaders()
    for (const [name, value] of Object.entries(headers)) all.append(name, value)
    await js.publish(subject, data, { headers: all })
  }
  return {
    nc,
    jsm,
    publish,
    ask: async (data, headers = {}) => {
      const inbox = createInbox()
      const subscription = nc.subscribe(inbox, { max: 1, timeout: 15_000 })
      await publish(data, { 'Spillway-Reply-To': inbox, ...headers })
      for await (const message of subscription) return message.json<Body>()
      throw new Error('the inbox was closed without an answer')
    },
    settled: async (ms) => {
      await until(
        'the broker keeps nothing',
        async () => {
          const { num_pending, num_ack_pending } = await info()
          const { state } = await jsm.streams.info(stream)
          return num_pending + num_ack_pending + state.messages === 0
        },
        ms,
      )
    },
    deliveries: async () => (await info()).delivered.consumer_seq,
    close: () => nc.close(),
  }
}

export const bytesOf = (value: unknown): Uint8Array =>
  Buffer.from(typeof value === 'string' ? value : JSON.stringify(value))

export interface KeyHolder {
  identity: string
  roles: string[]
}

/** A file of API keys; the key of each is its name. */
export async function writeKeys(file: string, holders: Readonly<Record<string, KeyHolder>>): Promise<void> {
  const entries = Object.entries(holders).map(([key, holder]) => [
    `sha256:${createHash('sha256').update(key).digest('hex')}`,
    holder,
  ])
  await writeFile(file, JSON.stringify(Object.fromEntries(entries)))
}

export const bearer = (key: string): Headers => ({ authorization: `Bearer ${key}` })
