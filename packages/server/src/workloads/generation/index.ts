/** Generation: streams of text from an upstream, through a pool, a queue and a log that outlives connections (docs/guides/generation.md). */
import { pressure } from 'spillway/workload'
import type { Workload } from '../../workload.js'
import { Admission, queueName } from './admission.js'
import { Handler } from './handler.js'
import { Orphans } from './orphans.js'
import { type GenerationDeps, generationParts } from './parts.js'
import { Generation } from './request.js'
import { generationRoutes } from './routes.js'
import { Serving } from './serving.js'
import { StreamDirectory } from './stream-directory.js'
import { Watch } from './watch.js'

export const generation: Workload = {
  name: 'generation',
  define: (context) => {
    const deps = generationParts(context)
    const workload = defineGeneration(deps)
    return {
      offers: { outputOf: deps.outputOf },
      checks: deps.checks,
      routes: (add) => add.plugin(generationRoutes(workload)),
      start: () => workload.start(),
      drain: () => workload.serving.drain(),
      close: () => workload.close(),
    }
  },
}

export interface GenerationWorkload {
  deps: GenerationDeps
  serving: Serving
  start(): void
  /** Call it when nothing runs any more and the store is still open. */
  close(): Promise<void>
}

/** Time for opening and ending the stream, in addition to its own limits. */
const marginMs = 30_000
const showMs = 1_000

function defineGeneration(deps: GenerationDeps): GenerationWorkload {
  const { intake, settings, metrics, relay, upstream } = deps
  const directory = new StreamDirectory(deps)
  let handler: Handler | undefined
  const admission = new Admission(deps, (places) => {
    const own = new Handler(deps, directory, places)
    handler = own
    return intake.define('generation', {
      body: Generation,
      lane: ({ lane }) => [queueName, lane],
      gates: [pressure()],
      // A separate level: generations may wait long and must not set the virtual time of others.
      priority: 7,
      slots: { name: 'generation', concurrency: settings.concurrency },
      abortable: true,
      timeoutMs: settings.limits.totalMs + marginMs,
      maxRetries: settings.failover.enabled ? settings.failover.retriesMax : 0,
      retry: { baseMs: settings.failover.baseDelayMs, maxMs: settings.failover.maxDelayMs },
      run: (generation, context) => own.run(generation, context),
    })
  })
  if (handler === undefined) throw new Error('generation was not defined')
  const watch = new Watch(deps, handler)
  const orphans = new Orphans(deps)
  const serving = new Serving(deps, { admission, directory, handler, watch })
  intake.onNotice('stream-watch', (text) => {
    const [id = '', watcher] = text.split(':')
    if (watcher === intake.instance) return
    watch.shared(id)
    for (const name of ['postgres', 'redis'] as const) deps.logOf(name)?.writer.ring(id)
  })
  let timer: NodeJS.Timeout | undefined
  let stopSweep = async (): Promise<void> => undefined
  const show = (): void => {
    metrics.poolState.set(admission.poolState)
    metrics.queueDepth.set(admission.waiting)
  }
  return {
    ...{ deps, serving },
    start() {
      watch.start()
      orphans.start()
      timer = setInterval(show, showMs)
      timer.unref()
      stopSweep = deps.startSweep()
    },
    async close() {
      clearInterval(timer)
      await Promise.all([watch.stop(), orphans.stop()])
      for (const name of ['postgres', 'redis'] as const) await deps.logOf(name)?.writer.close()
      relay.close()
      await upstream.close()
      await stopSweep()
      deps.sse.close()
      await deps.close()
    },
  }
}
