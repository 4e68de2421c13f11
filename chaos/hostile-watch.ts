/**
 * A process of its own beside an attack: asks for health every 20 ms on new connections, and plays an honest caller that pushes,
 * pops and acknowledges small messages. Started with the server's origin; `stop` over the channel ends it with a report.
 */
import { Agent, type Dispatcher, request } from 'undici'

export interface WatchReport {
  health: { asked: number; failed: number; p50Ms: number; p99Ms: number }
  honest: { calls: number; refused: number; failed: number }
}

const healthEveryMs = 20
const honestEveryMs = 100
const timeoutMs = 10_000
const identity = { 'x-user-id': 'honest' }
const queue = `honest-${process.pid}`

const [origin = ''] = process.argv.slice(2)
const honest: WatchReport['honest'] = { calls: 0, refused: 0, failed: 0 }
const latencies: number[] = []
let healthFailed = 0
let over = false

async function call(dispatcher: Dispatcher, method: 'GET' | 'POST', path: string, body?: unknown) {
  const answer = await request(`${origin}${path}`, {
    dispatcher,
    method,
    headers: { ...identity, ...(body !== undefined && { 'content-type': 'application/json' }) },
    ...(body !== undefined && { body: JSON.stringify(body) }),
    signal: AbortSignal.timeout(timeoutMs),
  })
  const text = await answer.body.text()
  return { status: answer.statusCode, body: text === '' ? null : (JSON.parse(text) as unknown) }
}

/** What an ordinary caller may expect: done, queued, or a refusal, which is counted. */
async function honestly(
  dispatcher: Dispatcher,
  method: 'GET' | 'POST',
  path: string,
  body?: unknown,
): Promise<unknown> {
  honest.calls++
  try {
    const answer = await call(dispatcher, method, path, body)
    if (answer.status < 300) return answer.body
    if (answer.status === 429 || answer.status === 503) honest.refused++
    else honest.failed++
  } catch {
    // A broken connection, or no answer in time.
    honest.failed++
  }
  return null
}

interface Popped {
  messages: { transactionId: string; partitionId: string; leaseId: string }[]
}

async function beHonest(): Promise<void> {
  const agent = new Agent({ connections: 4 })
  while (!over) {
    const began = performance.now()
    await honestly(agent, 'POST', '/api/v1/push', { items: [{ queue, payload: { at: began } }] })
    const popped = (await honestly(agent, 'GET', `/api/v1/pop/queue/${queue}?batch=10`)) as Popped | null
    for (const { transactionId, partitionId, leaseId } of popped?.messages ?? []) {
      await honestly(agent, 'POST', '/api/v1/ack', { transactionId, partitionId, leaseId, status: 'completed' })
    }
    await pause(honestEveryMs - (performance.now() - began))
  }
  await agent.close()
}

/** A probe has no connection to keep. */
async function askHealth(): Promise<void> {
  while (!over) {
    const began = performance.now()
    const agent = new Agent({ pipelining: 0 })
    try {
      const { status } = await call(agent, 'GET', '/health')
      if (status !== 200) healthFailed++
    } catch {
      healthFailed++
    }
    latencies.push(performance.now() - began)
    await agent.destroy()
    await pause(healthEveryMs - (performance.now() - began))
  }
}

const pause = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, Math.max(0, ms)))

function quantile(sorted: readonly number[], share: number): number {
  return Math.round((sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? 0) * 10) / 10
}

const busy = Promise.all([askHealth(), beHonest()])
process.on('disconnect', () => process.exit())
process.on('message', async () => {
  over = true
  await busy
  const sorted = latencies.toSorted((a, b) => a - b)
  const health = {
    asked: sorted.length,
    failed: healthFailed,
    p50Ms: quantile(sorted, 0.5),
    p99Ms: quantile(sorted, 0.99),
  }
  process.send?.({ health, honest } satisfies WatchReport, () => process.disconnect())
})
process.send?.('watching')
