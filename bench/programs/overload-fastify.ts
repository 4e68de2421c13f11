/**
 * The doors without Spillway: the same handler alone (`none`), with @fastify/under-pressure watching the process
 * (`process`), and with its custom health check watching the calls that wait for the downstream as well (`downstream`).
 * `refuse` refuses everything: what refusing costs at the least.
 */
import underPressure, { type FastifyUnderPressureOptions } from '@fastify/under-pressure'
import type { FastifyInstance } from 'fastify'
import { createDoor, Downstream, DownstreamLate, Order, openDoor } from '../overload-door.js'
import { downstreamPerSecond, given } from '../overload-wire.js'

const watch = given('WATCH')
const downstream = new Downstream(given('DOWNSTREAM'))
const app = createDoor()

const processWatch: FastifyUnderPressureOptions = {
  // A tenth of a second is long for a process that only passes calls on. The default looks once a second only.
  maxEventLoopDelay: 100,
  maxEventLoopUtilization: 0.98,
  eventLoopUtilizationMode: 'interval',
  maxHeapUsedBytes: 1_000_000_000,
  maxRssBytes: 1_500_000_000,
  sampleInterval: 100,
  retryAfter: 2,
}

const refusal = { status: 503, title: 'Overloaded', detail: 'This instance is busy. Try again later.' }

/** Half a second of the downstream's work may wait. */
const waitingMax = downstreamPerSecond / 2

function watchOptions(): FastifyUnderPressureOptions | null {
  switch (watch) {
    case 'none':
    case 'refuse':
      return null
    case 'process':
      return processWatch
    case 'downstream':
      return { ...processWatch, healthCheck: async () => downstream.waiting <= waitingMax, healthCheckInterval: 100 }
    default:
      throw new Error(`WATCH is none, process, downstream or refuse, not ${watch}`)
  }
}

// In a scope of its own, as its documentation advises: the health route is not shed.
await app.register(async (scope: FastifyInstance) => {
  const options = watchOptions()
  if (options !== null) await scope.register(underPressure, options)
  if (watch === 'refuse') {
    scope.addHook('onRequest', async (_request, reply) => reply.code(503).header('retry-after', '2').send(refusal))
  }
  scope.post<{ Body: Order }>('/orders', { schema: { body: Order } }, async (request, reply) => {
    try {
      return await downstream.fulfil(request.body)
    } catch (fault) {
      if (!(fault instanceof DownstreamLate)) throw fault
      return reply.code(504).send({ message: 'The downstream did not answer in time.' })
    }
  })
})

await openDoor(app, async () => {
  await downstream.close()
  await app.close()
})
