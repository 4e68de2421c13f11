/** Goodput over offered load, from half of what the downstream can do to ten times of it. */
import { doors, runPlan } from '../overload-run.js'
import { figuresOf, plotsOf, verdictsOf } from '../overload-verdicts.js'
import { connectionsAtOnce, connectionsMax, deadlineMs, downstreamPerSecond } from '../overload-wire.js'
import type { Section } from '../section.js'

const full = { ratesPerSecond: [500, 800, 1_000, 1_500, 2_000, 5_000, 10_000], seconds: 60, warmUpSeconds: 10 }
const quick = { ratesPerSecond: [500, 1_000, 2_000, 5_000], seconds: 6, warmUpSeconds: 4 }
/** What follows a step until the next can begin: late answers, a full queue. */
const settleSeconds = 6

export const overload: Section = {
  name: 'overload',
  title: 'Overload: goodput over offered load',
  estimateSeconds: (isQuick) => {
    const { ratesPerSecond, seconds, warmUpSeconds } = isQuick ? quick : full
    const steps = doors.flatMap(({ fromPerSecond = 0 }) => ratesPerSecond.filter((rate) => rate >= fromPerSecond))
    return 15 + doors.length * (warmUpSeconds + 2) + steps.length * (seconds + settleSeconds)
  },
  async run(context) {
    const results = await runPlan(context, { doors, ...(context.quick ? quick : full) })
    return {
      figures: figuresOf(results),
      verdicts: verdictsOf(results, 'spillway'),
      plots: plotsOf(results),
      notes: notes(context.quick),
    }
  },
}

const notes = (isQuick: boolean): string[] => [
  `A downstream in a process of its own does ${downstreamPerSecond} orders a second (20 at once, 20 ms each), first come first served. Five front doors, a process each, call it with the same code over the same pool of 100 connections: Spillway (\`whenBusy: 'refuse'\`, 30 at once, the pressure gate), Spillway queueing what cannot run now (and at most 10,000 of it), @fastify/under-pressure watching the process, the same with a health check that fails while more than 500 calls wait for the downstream, and nothing. \`refusing all\` is a Fastify that answers 503 to everything: no door can refuse more on this machine.`,
  `Orders arrive in an open loop, as a Poisson process of a fixed seed, the same for all doors; at each offered load one door is measured after the other. An order's time counts from when it was due. A client leaves after ${deadlineMs / 1_000} s. ${connectionsAtOnce} connections are open from the start and at most ${connectionsMax} in all. Goodput is what was answered 200 with the right result by then and before the step ended; a 202 is counted apart.`,
  'Spillway makes each order durable in PostgreSQL before it runs, and its completion before it answers; the others keep nothing. All processes, PostgreSQL and the load generator share one machine: at the highest loads that is what limits them. If the generator itself was late, the table says so.',
  'All doors abort a call after the same five seconds. Without that, those that queue would continue to work for clients that left.',
  ...(isQuick
    ? [
        'The short steps end before an unbounded queue is as old as the deadline: the doors without Spillway look better than they are. The growth of RSS is counted from the sixth second on, when the process is still warming up.',
      ]
    : []),
]
