/** The servers of the messages' section, the load on them, and what they hold. */
import { request } from 'node:http'
import { fileURLToPath } from 'node:url'
import type { Children } from '../children.js'
import { findWrk } from '../load/wrk.js'
import { nextNumbers, pad, pushBody, pushPath, type Shape } from '../programs/message-body.js'
import type { Consumed, Consumption } from '../programs/message-consumers.js'
import type { Flow, Flowed } from '../programs/message-flow.js'
import type { Produced, Production } from '../programs/message-producers.js'
import type { BenchContext } from '../section.js'
import { query, type Site } from './petitions-sites.js'

export interface Server extends Site {
  readonly databaseUrl: string
  stop(): Promise<void>
}

export async function startServer(context: BenchContext, name: string): Promise<Server> {
  const databaseUrl = await context.postgres.createDatabase(name)
  const child = await context.serve({ DATABASE_URL: databaseUrl })
  return { origin: child.origin, pid: child.pid, databaseUrl, stop: () => child.stop() }
}

/** Asks the clients' process. */
export class Clients {
  readonly #site: Site

  constructor(site: Site) {
    this.#site = site
  }

  consume(asked: Consumption): Promise<Consumed> {
    return this.#ask('consume', asked)
  }

  flow(asked: Flow): Promise<Flowed> {
    return this.#ask('flow', asked)
  }

  produce(asked: Production): Promise<Produced> {
    return this.#ask('produce', asked)
  }

  async #ask<T>(kind: string, asked: object): Promise<T> {
    const answer = await fetchPatiently(`${this.#site.origin}/${kind}`, JSON.stringify(asked))
    if (answer.status !== 200) throw new Error(`the clients failed to ${kind}: ${answer.text}`)
    return JSON.parse(answer.text) as T
  }
}

const script = fileURLToPath(new URL('../programs/messages.lua', import.meta.url))

/** Pushes in a closed loop. Rejects when a connection failed or nothing was accepted. */
export type PushLoad = (to: Site, shape: Shape, connections: number, seconds: number) => Promise<Produced>

/** By wrk, which leaves the machine to what is measured; where there is none by our own clients. */
export async function pushLoad(context: BenchContext, children: Children, clients: Clients): Promise<PushLoad> {
  const wrk = await findWrk((text) => context.say(text))
  if (wrk === null) {
    return async (to, shape, connections, seconds) =>
      checked(to, 0, await clients.produce({ origin: to.origin, shape, first: nextNumbers(), connections, seconds }))
  }
  return async (to, shape, connections, seconds) => {
    const { queue, partitions, items, lanes } = shape
    const child = children.start({
      command: wrk.command,
      args: [
        ...['-t', '1', '-c', String(connections), '-d', `${seconds}s`, '--timeout', '10s', '-s', script],
        ...[`${to.origin}${pushPath}`, '--', new URL(to.origin).host, pushPath, queue],
        ...[partitions, items, lanes, nextNumbers()].map(String),
        pad,
      ],
      env: wrk.env,
      cwd: fileURLToPath(new URL('.', import.meta.url)),
      name: 'wrk',
    })
    const [, json = ''] = await child.line(/^RESULT (.*)$/, (seconds + 30) * 1_000)
    await child.ended
    const { failed, ...produced } = JSON.parse(json) as Produced & { failed: number }
    return checked(to, failed, produced)
  }
}

function checked(to: Site, failed: number, produced: Produced): Produced {
  if (failed === 0 && produced.answered > produced.refused) return produced
  throw new Error(
    `of ${produced.answered} pushes to ${to.origin} ${produced.refused} were refused and ${failed} connections failed`,
  )
}

export interface Opening {
  /** Default: that of those who name none. */
  readonly groups?: readonly string[]
  readonly options?: object
}

/** Makes a queue and its groups, so that every push has somebody to make it ready for. */
export async function openQueue(server: Server, queue: string, opening: Opening = {}): Promise<void> {
  const { groups = [''], options = {} } = opening
  const configured = await fetchPatiently(`${server.origin}/api/v1/configure`, JSON.stringify({ queue, options }))
  if (configured.status !== 201) throw new Error(`the queue ${queue} was not made: ${configured.text}`)
  for (const group of groups) {
    const named = group === '' ? '' : `?consumerGroup=${group}`
    const popped = await fetch(`${server.origin}/api/v1/pop/queue/${queue}${named}`)
    await popped.body?.cancel()
    if (popped.status !== 204) throw new Error(`the new queue ${queue} answered a pop with ${popped.status}`)
  }
}

const fillItems = 200

/** The same number of messages for each partition; not faster than the server stores them. */
export async function fill(clients: Clients, server: Server, queue: string, spread: Filling): Promise<void> {
  const { partitions, each } = spread
  const requests = (partitions * each) / fillItems
  if (!Number.isInteger(requests)) throw new Error(`${partitions} × ${each} messages are no whole number of requests`)
  const shape: Shape = { queue, partitions, items: fillItems, lanes: Math.min(partitions, fillItems) }
  await clients.produce({ origin: server.origin, shape, first: nextNumbers(), connections: 2, requests })
  await untilStored(server)
  const stored = await storedIn(server, queue)
  if (stored !== partitions * each) throw new Error(`${queue}: ${partitions * each} were pushed, ${stored} are stored`)
}

export interface Filling {
  readonly partitions: number
  readonly each: number
}

/** Messages of a queue in the log. */
export async function storedIn(server: Server, queue: string): Promise<number> {
  const [found] = await query<{ n: number }>(
    server.databaseUrl,
    `SELECT count(m.seq)::int AS n FROM spillway.mq_queues q JOIN spillway.mq_partitions p ON p.queue = q.id
       JOIN spillway.mq_messages m ON m.partition = p.id WHERE q.name = $1`,
    [queue],
  )
  return found?.n ?? 0
}

const storedTimeoutMs = 60_000

/** Waits until every push that was accepted with 202 is in the log. */
export async function untilStored(server: Server): Promise<void> {
  const deadline = performance.now() + storedTimeoutMs
  for (;;) {
    const [found] = await query<{ n: number }>(server.databaseUrl, 'SELECT count(*)::int AS n FROM spillway.ops')
    if (found?.n === 0) return
    if (performance.now() > deadline) throw new Error(`${found?.n} pushes were accepted and are still not stored`)
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
}

/** Messages by what became of their pushes, since the server started. */
export async function pushedBy(server: Server): Promise<ReadonlyMap<string, number>> {
  const text = await (await fetch(`${server.origin}/metrics`)).text()
  const counts = new Map<string, number>()
  for (const [, status = '', count] of text.matchAll(/^spillway_messages_pushed_total\{status="(\w+)"\} (\d+)/gm)) {
    counts.set(status, Number(count))
  }
  if (counts.size === 0) throw new Error('/metrics has no spillway_messages_pushed_total')
  return counts
}

/** The echo is a fair measure only while it answers what Spillway answers: status, names of headers, length of body. */
export async function compareAnswers(own: Site, echo: Site, shape: Shape): Promise<void> {
  const weigh = async (site: Site): Promise<string> => {
    const headers = { 'content-type': 'application/json' }
    const body = pushBody(shape, { first: nextNumbers() }, 0)
    const answer = await fetch(`${site.origin}${pushPath}`, { method: 'POST', headers, body })
    const { length } = await answer.text()
    return `${answer.status}, ${length} bytes, ${[...answer.headers.keys()].sort().join(' ')}`
  }
  const [is, wanted] = [await weigh(echo), await weigh(own)]
  if (is !== wanted) {
    throw new Error(`programs/message-echo.ts must answer as Spillway does.\nSpillway: ${wanted}\nit:       ${is}`)
  }
}

/** Not fetch, which gives up when an answer takes longer than five minutes. */
function fetchPatiently(url: string, body: string): Promise<{ status: number; text: string }> {
  return new Promise((resolve, reject) => {
    const asked = request(url, { method: 'POST', headers: { 'content-type': 'application/json' } }, (answer) => {
      let text = ''
      answer.setEncoding('utf8')
      answer.on('data', (chunk: string) => {
        text += chunk
      })
      answer.once('end', () => resolve({ status: answer.statusCode ?? 0, text }))
      answer.once('error', reject)
    })
    asked.once('error', reject)
    asked.end(body)
  })
}
