/** Messages: a partitioned queue behind the operation queue's load management (docs/guides/messages.md). */
import { PushRequest, SubmitHeaders } from '@spillway/protocol/schema'
import { limits } from '@spillway/protocol/wire'
import { tableRoutes } from '../../route-table.js'
import type { Workload } from '../../workload.js'
import { administrationRoutes } from './admin/routes.js'
import { Consume } from './consume/consume.js'
import { consumeRoutes } from './consume/routes.js'
import type { MessagesContext } from './context.js'
import { messagesSql } from './generated/sql.js'
import { MessageSizes } from './message-sizes.js'
import { createMessageMetrics } from './metrics.js'
import { Push, pushType } from './push/push.js'
import { pushMount } from './push-mount.js'
import { Queues } from './queues.js'
import { Seal } from './seal.js'
import { messageSweep, sweepEveryMs } from './sweeper.js'

const pushSchema = {
  tags: ['messages'],
  summary: 'Push messages: 201 when all are stored, 202 when some have to wait their turn',
  headers: SubmitHeaders,
  body: PushRequest,
}

export const messages: Workload = {
  name: 'messages',
  sql: messagesSql,
  define: ({ config, intake, schema, log, registry, buffers }) => {
    const { encryptionKey } = config.messages
    const context: MessagesContext = {
      ...{ intake, schema, log, buffers, settings: config.messages, pageBytesMax: config.server.pageBytesMax },
      metrics: createMessageMetrics(registry),
      seal: encryptionKey === null ? null : new Seal(Buffer.from(encryptionKey, 'hex')),
      queues: new Queues(intake, schema),
      sizes: new MessageSizes(),
    }
    const messages = { ...context, push: new Push(context), consume: new Consume(context) }
    const { push, consume } = messages
    intake.onNotice(
      'mq',
      (marks) => consume.arrivals.came(new Set(marks.split(','))),
      () => consume.arrivals.missed(),
    )
    const batch = messageSweep(intake, schema)
    const stopSweep = intake.sweeps.add({ name: 'messages', everyMs: sweepEveryMs, batch })
    return {
      namedTypes: [pushType],
      routes: async (add) => {
        add.mounted({
          url: '/api/v1/push',
          mount: pushMount(intake, push),
          schema: pushSchema,
          bodyLimitBytes: Math.max(limits.pushBodyBytes, config.server.bodyLimitBytes),
          errorForm: true,
        })
        await add.plugin(tableRoutes({ intake, tag: 'messages', errorForm: true }, messages, consumeRoutes))
        await add.plugin(administrationRoutes(messages))
      },
      drain: async () => {
        consume.arrivals.close()
        await stopSweep()
      },
    }
  },
}
