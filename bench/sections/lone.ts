/** One request at a time on an idle machine: what durable accept adds to a plain commit. */
import { Agent, request } from 'node:http'
import { setTimeout as delay } from 'node:timers/promises'
import { figure, verdict } from '../figures.js'
import { requestMaker } from '../load/requests.js'
import { interleave, of, type Variant } from '../rounds.js'
import type { BenchContext, Section, SectionResult } from '../section.js'
import { median, percentile } from '../statistics.js'

const perSecond = 50
const perRound = 50
const warmUp = 200
const rounds = (quick: boolean): number => (quick ? 5 : 20)

const names = {
  echo: 'bare echo',
  commit: 'one commit per request',
  queued: 'Spillway, 202',
  direct: 'Spillway, run at once, 201',
} as const

export const lone: Section = {
  name: 'lone',
  title: 'A lone request',
  estimateSeconds: (quick) => Object.keys(names).length * ((rounds(quick) * perRound) / perSecond + warmUp / 200) + 12,
  run: measure,
}

async function measure(context: BenchContext): Promise<SectionResult> {
  context.say('starting the servers')
  const program = async (file: string, env: Record<string, string>): Promise<string> => {
    const [, origin = ''] = await context.start(file, { env }).line(/^LISTENS (\S+)$/)
    return origin
  }
  const database = (name: string): Promise<string> => context.postgres.createDatabase(`lone_${name}`)
  const [echo, commit, queued, direct] = await Promise.all([
    program('programs/echo.ts', {}),
    database('commit').then((url) => program('programs/one-commit.ts', { DATABASE_URL: url, POOL_MAX: '4' })),
    database('queued').then(async (url) => {
      return (await context.serve({ DATABASE_URL: url, SPILLWAY_ROLES: 'gateway' })).origin
    }),
    database('direct').then((url) => program('programs/gated.ts', { DATABASE_URL: url, WORK: 'true' })),
  ])
  const callers = [
    new Caller(names.echo, echo, '/api/v1/operations', 202),
    new Caller(names.commit, commit, '/api/v1/operations', 202),
    new Caller(names.queued, queued, '/api/v1/operations', 202),
    new Caller(names.direct, direct, '/plain', 201),
  ]
  try {
    context.say('warming up')
    for (const caller of callers) for (let n = 0; n < warmUp; n++) await caller.call()
    const total = rounds(context.quick)
    const latencies = await interleave(callers.map(paced), total, (round) => {
      if (round % 5 === 0) context.say(`round ${round + 1} of ${total}`)
    })
    return conclude(latencies)
  } finally {
    for (const caller of callers) caller.close()
  }
}

/** One kept connection; the next request leaves when the previous one is answered. */
class Caller {
  readonly name: string
  readonly #agent = new Agent({ keepAlive: true, maxSockets: 1 })
  readonly #url: string
  readonly #status: number
  readonly #next: ReturnType<typeof requestMaker>

  constructor(name: string, origin: string, path: string, status: number) {
    this.name = name
    this.#url = `${origin}${path}`
    this.#status = status
    const isAsync = status === 202
    this.#next = requestMaker({ origin, path, connections: 1, seconds: 0, lanes: 200, async: isAsync })
  }

  /** Milliseconds from sending to the end of the answer. */
  call(): Promise<number> {
    const { method, headers, body } = this.#next()
    return new Promise((resolve, reject) => {
      const began = performance.now()
      const sent = request(this.#url, { method, headers, agent: this.#agent }, (answer) => {
        answer.resume()
        answer.once('end', () => {
          if (answer.statusCode === this.#status) resolve(performance.now() - began)
          else reject(new Error(`${this.name} answered ${answer.statusCode}, not ${this.#status}`))
        })
      })
      sent.once('error', reject)
      sent.end(body)
    })
  }

  close(): void {
    this.#agent.destroy()
  }
}

/** A round: some requests, each a fixed time after the one before it. */
function paced(caller: Caller): Variant<readonly number[]> {
  return {
    name: caller.name,
    async run() {
      const samples: number[] = []
      for (let n = 0; n < perRound; n++) {
        const took = await caller.call()
        samples.push(took)
        await delay(Math.max(0, 1_000 / perSecond - took))
      }
      return samples
    },
  }
}

function conclude(latencies: ReadonlyMap<string, readonly (readonly number[])[]>): SectionResult {
  const variants = Object.values(names)
  const medians = (variant: string): number[] => of(latencies, variant).map((samples) => median(samples))
  const added = (variant: string): number => {
    const plain = medians(names.commit)
    return median(medians(variant).map((value, round) => value - (plain[round] ?? Number.NaN)))
  }
  return {
    figures: [
      ...variants.map((variant) =>
        figure({ what: `lone request, ${perSecond}/s, median`, variant, unit: 'ms', runs: medians(variant) }),
      ),
      ...variants.map((variant) =>
        figure({
          what: `lone request, ${perSecond}/s, p99`,
          variant,
          unit: 'ms',
          runs: [percentile(of(latencies, variant).flat(), 0.99)],
        }),
      ),
    ],
    verdicts: [
      verdict({
        what: 'latency that a lone durable accept adds to one plain commit',
        value: added(names.queued),
        unit: 'ms',
        rule: 'at-most',
        target: 1,
      }),
    ],
    plots: [],
    notes: [
      `One connection, one request at a time, about ${perSecond} in a second, in rounds of ${perRound} that alternate between the variants. What is added is the median of the differences between the rounds' medians.`,
      `Run at once (a handler that does nothing, through the library) is two commits: one that accepts and claims, one that stores the result. It added ${added(names.direct).toFixed(2)} ms.`,
    ],
  }
}
