/** Watches a door as a load balancer would: every 100 ms, on a connection of its own. Also reads RSS and CPU that way. */
import { Agent, get } from 'node:http'
import type { Health } from './overload-door.js'

import { deadlineMs } from './overload-wire.js'
import { median } from './statistics.js'

const everyMs = 100

interface Probe {
  /** Since the watch began. */
  readonly atMs: number
  /** Until the answer; the deadline when there was none. */
  readonly tookMs: number
  readonly health: Health | null
}

export interface Watched {
  readonly tookMs: readonly number[]
  readonly unanswered: number
  /** The median of each second, in MB. */
  readonly rssMb: readonly number[]
  /** Share of one core that the door used. */
  readonly cores: number
}

/** One look at the door's health; null if it does not answer within the deadline. */
export function askHealth(origin: string, agent?: Agent): Promise<Health | null> {
  return new Promise((resolve) => {
    const request = get(`${origin}/health`, { ...(agent && { agent }), timeout: deadlineMs }, (response) => {
      let text = ''
      response.setEncoding('utf8')
      response.on('data', (chunk: string) => {
        text += chunk
      })
      response.on('end', () => resolve(response.statusCode === 200 ? (JSON.parse(text) as Health) : null))
    })
    request.on('timeout', () => request.destroy())
    request.on('error', () => resolve(null))
  })
}

export class HealthWatch {
  readonly #origin: string
  readonly #agent = new Agent({ keepAlive: true, maxSockets: 1 })
  readonly #startedAt = performance.now()
  readonly #probes: Promise<Probe>[] = []
  readonly #timer: NodeJS.Timeout

  constructor(origin: string) {
    this.#origin = origin
    this.#timer = setInterval(() => this.#probes.push(this.#probe()), everyMs)
  }

  async stop(): Promise<Watched> {
    clearInterval(this.#timer)
    const probes = await Promise.all(this.#probes)
    this.#agent.destroy()
    const answered = probes.flatMap(({ atMs, health }) => (health === null ? [] : [{ atMs, ...health }]))
    const [first, last] = [answered[0], answered[answered.length - 1]]
    return {
      tookMs: probes.map(({ tookMs }) => tookMs),
      unanswered: probes.length - answered.length,
      rssMb: perSecond(answered),
      cores:
        first === undefined || last === undefined || last === first
          ? Number.NaN
          : (last.cpuMs - first.cpuMs) / (last.atMs - first.atMs),
    }
  }

  /** One connection: a probe waits for the one before it, and its time counts from when it was due. */
  async #probe(): Promise<Probe> {
    const started = performance.now()
    const health = await askHealth(this.#origin, this.#agent)
    const tookMs = health === null ? deadlineMs : performance.now() - started
    return { atMs: started - this.#startedAt, tookMs, health }
  }
}

function perSecond(answered: readonly { atMs: number; rss: number }[]): number[] {
  const seconds = new Map<number, number[]>()
  for (const { atMs, rss } of answered) {
    const second = Math.floor(atMs / 1_000)
    seconds.set(second, [...(seconds.get(second) ?? []), rss / 1_048_576])
  }
  return [...seconds.values()].map((values) => median(values))
}
