/**
 * A gateway's view of routers in other processes: polls their metrics in the background, never in a request.
 *
 *   known (inactive, warning, active) ──three polls in a row without an answer──► unknown ──an answer──► known
 *
 * It counts polls, not time: each poll may take its timeout. A poll that is skipped while another is open does not
 * count, so slow answers are accepted if the timeout is longer than the interval. Unknown is handled as warning: an
 * isolated gateway neither accepts everything nor refuses everything. Of several routers the worst counts.
 */
export type RouterStatus = 'inactive' | 'warning' | 'active' | 'unknown'

export interface RouterWatchOptions {
  urls: readonly string[]
  intervalMs: number
  timeoutMs: number
  /** The values at which a router that reports no level counts as warning. */
  critical: { backlog: number; latencyMs: number; inFlight: number }
  onStatus(status: RouterStatus): void
  log: { warn(object: object, text: string): void; info(object: object, text: string): void }
  fetch?: typeof fetch
}

interface Known {
  status: Exclude<RouterStatus, 'unknown'> | null
  /** Unanswered polls since then. */
  missed: number
}

const missedMax = 3
const metricsBytesMax = 8 * 1_048_576

export class RouterWatch {
  readonly #options: RouterWatchOptions
  readonly #known = new Map<string, Known>()
  #timer: NodeJS.Timeout | undefined
  #asking = false
  #status: RouterStatus = 'unknown'

  constructor(options: RouterWatchOptions) {
    this.#options = options
  }

  get status(): RouterStatus {
    return this.#status
  }

  start(): void {
    this.#options.onStatus(this.#status)
    void this.ask()
    this.#timer = setInterval(() => void this.ask(), this.#options.intervalMs)
    this.#timer.unref()
  }

  stop(): void {
    clearInterval(this.#timer)
  }

  /** Polls all of them once. A hanging router blocks nobody: the next round is skipped, not queued. */
  async ask(): Promise<void> {
    if (this.#asking) return
    this.#asking = true
    try {
      await Promise.all(this.#options.urls.map((url) => this.#askOne(url)))
    } finally {
      this.#asking = false
    }
    this.#judge()
  }

  async #askOne(url: string): Promise<void> {
    const { log } = this.#options
    try {
      const status = statusOf(await this.#read(url), this.#options.critical)
      if (status === null) throw new Error('the answer has no router_intake_backpressure_active')
      if ((this.#known.get(url)?.missed ?? 0) > 0) log.info({ url: shown(url) }, 'metrics of the router readable again')
      this.#known.set(url, { status, missed: 0 })
    } catch (fault) {
      const { status, missed } = this.#known.get(url) ?? { status: null, missed: 0 }
      this.#known.set(url, { status, missed: missed + 1 })
      if (missed === 0) log.warn({ err: fault, url: shown(url) }, 'cannot read the metrics of the router')
    }
  }

  async #read(url: string): Promise<string> {
    const { timeoutMs, fetch: get = fetch } = this.#options
    const late = new AbortController()
    const timer = setTimeout(() => late.abort(new Error(`no answer within ${timeoutMs} ms`)), timeoutMs)
    try {
      const response = await get(url, { signal: late.signal, redirect: 'error' })
      if (!response.ok || response.body === null) throw new Error(`answered ${response.status}`)
      const decoder = new TextDecoder()
      let text = ''
      for await (const chunk of response.body) {
        text += decoder.decode(chunk as Uint8Array, { stream: true })
        if (text.length > metricsBytesMax) throw new Error(`answered more than ${metricsBytesMax} bytes`)
      }
      return text
    } finally {
      clearTimeout(timer)
    }
  }

  #judge(): void {
    const all = this.#options.urls.map((url): RouterStatus => {
      const known = this.#known.get(url)
      return known === undefined || known.missed >= missedMax ? 'unknown' : (known.status ?? 'unknown')
    })
    const status = (['active', 'unknown', 'warning'] as const).find((one) => all.includes(one)) ?? 'inactive'
    if (status === this.#status) return
    this.#status = status
    this.#options.onStatus(status)
  }
}

/** Null if these are not the metrics of a router. */
export function statusOf(metrics: string, critical: RouterWatchOptions['critical']): Known['status'] {
  const active = worst(metrics, 'router_intake_backpressure_active')
  if (active === null) return null
  const level = worst(metrics, 'router_intake_backpressure_level')
  if (active >= 1 || level === 2) return 'active'
  if (level !== null) return level >= 1 ? 'warning' : 'inactive'
  const pending = worst(metrics, 'router_jetstream_pending_messages') ?? 0
  const ackPending = worst(metrics, 'router_jetstream_ack_pending_messages') ?? 0
  const isHigh =
    pending + ackPending >= critical.backlog ||
    (worst(metrics, 'router_intake_processing_latency_p95') ?? 0) >= critical.latencyMs ||
    (worst(metrics, 'router_intake_inflight_messages') ?? 0) >= critical.inFlight
  return isHigh ? 'warning' : 'inactive'
}

/** The highest value of a gauge over its labels; null if missing. */
function worst(metrics: string, name: string): number | null {
  let highest: number | null = null
  for (const match of metrics.matchAll(new RegExp(String.raw`^${name}(?:\{[^\n]*\})? +(\S+)`, 'gm'))) {
    const value = Number(match[1])
    if (Number.isFinite(value) && (highest === null || value > highest)) highest = value
  }
  return highest
}

function shown(url: string): string {
  const { origin, pathname } = new URL(url)
  return origin + pathname
}
