/** Producers over HTTP in a closed loop: where there is no wrk, and to fill queues. */
import { setTimeout as delay } from 'node:timers/promises'
import { percentile } from '../statistics.js'
import { pushBody, pushPath, type Shape } from './message-body.js'
import { MessageConnection } from './message-connection.js'

export interface Production {
  readonly origin: string
  readonly shape: Shape
  /** The number of the first message. */
  readonly first: number
  readonly connections: number
  /** Ends after so long… */
  readonly seconds?: number
  /** …or when this many requests are accepted; refused ones are sent again. */
  readonly requests?: number
}

const refusedPauseMs = 200

/** The same figures as wrk reports (messages.lua). */
export interface Produced {
  readonly answered: number
  /** Of them, those that were not 2xx. */
  readonly refused: number
  readonly seconds: number
  readonly p99Ms: number
}

export async function produce({ origin, shape, first, ...ends }: Production): Promise<Produced> {
  const { connections: count, seconds = Number.POSITIVE_INFINITY, requests = Number.POSITIVE_INFINITY } = ends
  const connections = await MessageConnection.openAll(origin, count)
  const began = performance.now()
  const end = began + seconds * 1_000
  const tookMs: number[] = []
  let sent = 0
  let refused = 0
  const isFilling = Number.isFinite(requests)
  const push = async (connection: MessageConnection, body: string): Promise<boolean> => {
    const at = performance.now()
    const { status } = await connection.post(pushPath, body)
    tookMs.push(performance.now() - at)
    if (status < 300) return true
    refused++
    return false
  }
  const loop = async (connection: MessageConnection): Promise<void> => {
    while (sent < requests && performance.now() < end) {
      const body = pushBody(shape, { first, named: isFilling }, sent++)
      while (!(await push(connection, body)) && isFilling) await delay(refusedPauseMs)
    }
  }
  try {
    await Promise.all(connections.map(loop))
  } finally {
    for (const connection of connections) connection.leave()
  }
  return {
    answered: tookMs.length,
    refused,
    seconds: (performance.now() - began) / 1_000,
    p99Ms: percentile(tookMs, 0.99),
  }
}
