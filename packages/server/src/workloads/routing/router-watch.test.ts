import { describe, expect, it } from 'vitest'
import { type RouterStatus, RouterWatch, statusOf } from './router-watch.js'

const critical = { backlog: 100, latencyMs: 2_000, inFlight: 200 }
const subject = '{subject="beamline.router.v1.decide"}'
const metrics = (active: number, more = ''): string =>
  `# HELP router_intake_backpressure_active 1 while requests are refused\nrouter_intake_backpressure_active${subject} ${active}\n${more}`

describe('what the metrics of a router say', () => {
  it.each([
    ['active', metrics(1)],
    ['inactive', metrics(0)],
    ['warning', metrics(0, `router_intake_backpressure_level${subject} 1\n`)],
    ['active', metrics(0, `router_intake_backpressure_level${subject} 2\n`)],
    ['inactive', metrics(0, `router_intake_backpressure_level${subject} 0\nrouter_jetstream_pending_messages 5000\n`)],
    ['warning', metrics(0, 'router_jetstream_pending_messages{a="b"} 60\nrouter_jetstream_ack_pending_messages 40\n')],
    ['inactive', metrics(0, 'router_jetstream_pending_messages{a="b"} 60\nrouter_jetstream_ack_pending_messages 39\n')],
    ['warning', metrics(0, `router_intake_processing_latency_p95${subject} 2000\n`)],
    ['warning', metrics(0, `router_intake_inflight_messages${subject} 200\n`)],
    ['inactive', metrics(0, `router_intake_inflight_messages_max${subject} 900\n`)],
    [null, 'process_cpu_seconds_total 1\n'],
    [null, ''],
    [null, 'some_router_intake_backpressure_active 1\n'],
  ] as const)('%s', (status, text) => {
    expect(statusOf(text, critical)).toBe(status)
  })
})

function watchOf(urls: string[]) {
  const answers = new Map<string, () => Promise<Response>>()
  const heard: RouterStatus[] = []
  const watch = new RouterWatch({
    ...{ urls, intervalMs: 5_000, timeoutMs: 1_000, critical },
    onStatus: (status) => heard.push(status),
    log: { warn: () => undefined, info: () => undefined },
    fetch: ((url: string) => (answers.get(url) ?? (() => Promise.reject(new Error('refused'))))()) as typeof fetch,
  })
  return {
    ...{ watch, heard },
    answer: (url: string, text: string, status = 200) =>
      answers.set(url, () => Promise.resolve(new Response(text, { status }))),
    refuse: (url: string) => answers.delete(url),
    /** Hangs until the returned function is called. */
    hang: (url: string) => {
      let release: (text: string) => void = () => undefined
      const late = new Promise<Response>((resolve) => {
        release = (text) => resolve(new Response(text))
      })
      answers.set(url, () => late)
      return release
    },
  }
}

describe('a gateway that watches routers elsewhere', () => {
  const [a, b] = ['http://a/_metrics', 'http://b/_metrics'] as const

  it('knows nothing until it was answered', async () => {
    const { watch } = watchOf([a])
    expect(watch.status).toBe('unknown')
    await watch.ask()
    expect(watch.status).toBe('unknown')
  })

  it('goes by the worst of several', async () => {
    const { watch, answer } = watchOf([a, b])
    answer(a, metrics(0))
    answer(b, metrics(1))
    await watch.ask()
    expect(watch.status).toBe('active')
    answer(b, metrics(0))
    await watch.ask()
    expect(watch.status).toBe('inactive')
  })

  it('keeps the last status until the third missed poll, then reports unknown', async () => {
    const { watch, answer, refuse, heard } = watchOf([a])
    answer(a, metrics(1))
    await watch.ask()
    refuse(a)
    await watch.ask()
    await watch.ask()
    expect(watch.status).toBe('active')
    await watch.ask()
    expect(watch.status).toBe('unknown')
    answer(a, metrics(0))
    await watch.ask()
    expect(heard).toEqual(['active', 'unknown', 'inactive'])
  })

  it('does not count polls that are skipped while one may still be answered', async () => {
    const { watch, answer, hang, heard } = watchOf([a])
    answer(a, metrics(1))
    await watch.ask()
    const release = hang(a)
    const slow = watch.ask()
    for (let skipped = 0; skipped < 5; skipped++) await watch.ask()
    expect(watch.status).toBe('active')
    release(metrics(1))
    await slow
    expect(heard).toEqual(['active'])
  })

  it.each([
    ['an error', 'x', 500],
    ['something else', 'hello', 200],
  ])('takes %s for no answer', async (_, text, status) => {
    const { watch, answer } = watchOf([a])
    answer(a, text, status)
    await watch.ask()
    expect(watch.status).toBe('unknown')
  })
})
