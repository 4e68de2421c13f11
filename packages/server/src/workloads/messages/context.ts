import type { Config } from '../../config/index.js'
import type { WorkloadContext } from '../../workload.js'
import type { Consume } from './consume/consume.js'
import type { MessageSizes } from './message-sizes.js'
import type { createMessageMetrics } from './metrics.js'
import type { Push } from './push/push.js'
import type { Queues } from './queues.js'
import type { Seal } from './seal.js'

/** What all parts of the workload use. */
export interface MessagesContext extends Pick<WorkloadContext, 'intake' | 'schema' | 'log' | 'buffers'> {
  settings: Config['messages']
  /** A page of a list, and the payloads of a pop, end at this size. */
  pageBytesMax: number
  metrics: ReturnType<typeof createMessageMetrics>
  /** Null: there is no key, and no queue can be encrypted. */
  seal: Seal | null
  queues: Queues
  sizes: MessageSizes
}

export interface Messages extends MessagesContext {
  push: Push
  consume: Consume
}
