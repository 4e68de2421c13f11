/** Generation: streams of text from an upstream, through a pool, a queue and a log that outlives connections (docs/guides/generation.md). */
import { limits } from '@spillway/protocol/wire'
import { type Definition, type Periodic, type Permit, periodic, pressure } from 'spillway/workload'
import { SseHub } from '../../traffic/sse.js'
import type { Workload, WorkloadContext } from '../../workload.js'
import { Admission, queueName } from './admission.js'
import { DemoModel } from './demo-model.js'
import { Handler } from './handler.js'
import { createGenerationMetrics } from './metrics.js'
import { endOrphans } from './orphans.js'
import { Generation } from './request.js'
import { generationRoutes } from './routes.js'
import { Serving } from './serving.js'
import { StreamLogs } from './stream-logs.js'
import { OpenAiUpstream } from './upstream-openai.js'
import { Watch } from './watch.js'

/** Time for opening and ending the stream, in addition to its own limits. */
const marginMs = 30_000
const showMs = 1_000

export const generation: Workload = {
  name: 'generation',
  define: (context) => {
    const deps = generationDeps(context)
    const { intake, metrics, logs } = deps
    const handler = new Handler(deps)
    const admission = new Admission(deps, defineOperation(deps, handler))
    const watch = new Watch(deps, handler)
    const serving = new Serving(deps, admission, handler, watch)
    intake.onNotice('stream-watch', (text) => {
      const [id = '', watcher] = text.split(':')
      if (watcher === intake.instance) return
      watch.shared(id)
      logs.ring(id)
    })
    const show = (): void => {
      metrics.poolState.set(admission.poolState)
      metrics.queueDepth.set(admission.waiting)
    }
    let tasks: Periodic[] = []
    let stopSweep = async (): Promise<void> => undefined
    return {
      offers: { outputOf: logs.outputOf },
      checks: logs.checks,
      async routes(add) {
        for (const plugin of generationRoutes(deps, serving)) await add.plugin(plugin)
      },
      start() {
        tasks = [...watch.start(), endOrphans(deps), periodic(showMs, show)]
        stopSweep = logs.startSweep()
      },
      drain: () => serving.drain(),
      async close() {
        await Promise.all(tasks.map((task) => task.stop()))
        await logs.closeWriters()
        await deps.upstream.close()
        await stopSweep()
        deps.sse.close()
        await logs.close()
      },
    }
  },
}

export type GenerationDeps = ReturnType<typeof generationDeps>

function generationDeps(context: WorkloadContext) {
  const { config, intake, log, version } = context
  const settings = config.generation
  const { upstreamUrl: url, upstreamKey: key } = settings
  const metrics = createGenerationMetrics(context.registry)
  return {
    ...{ intake, log, metrics, settings, logs: new StreamLogs(context) },
    /** The permits of generations that were accepted here, by the names that they carry (`place`). */
    permits: new Map<string, Permit>(),
    chatBodyBytes: Math.max(limits.chatBodyBytes, config.server.bodyLimitBytes),
    /** How long running generations may continue after the process is asked to stop. */
    drainMs: config.server.drainSeconds * 1_000,
    sse: new SseHub({
      heartbeatMs: settings.heartbeatSeconds * 1_000,
      stallMs: settings.stallSeconds * 1_000,
      onStalled: () => metrics.slowReadersClosed.inc(),
    }),
    upstream:
      url === null
        ? new DemoModel({ tokensPerSecond: settings.demoTokensPerSecond })
        : new OpenAiUpstream({ url, key, version, connectionsMax: settings.concurrency }),
  }
}

function defineOperation({ intake, settings }: GenerationDeps, handler: Handler): Definition<Generation> {
  return intake.define('generation', {
    body: Generation,
    lane: ({ lane }) => [queueName, lane],
    gates: [pressure()],
    // A separate level: generations may wait long and must not set the virtual time of others.
    priority: 7,
    slots: { name: 'generation', concurrency: settings.concurrency },
    abortable: true,
    timeoutMs: settings.totalSeconds * 1_000 + marginMs,
    maxRetries: settings.failoverEnabled ? settings.failoverRetriesMax : 0,
    retry: { baseMs: settings.failoverBaseDelayMs, maxMs: settings.failoverMaxDelayMs },
    run: (given, context) => handler.run(given, context),
  })
}
