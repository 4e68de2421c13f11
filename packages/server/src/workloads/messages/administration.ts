/** What operators can see and change: one file per noun. */
import type { IntakeApi } from 'spillway/workload'
import { ConsumerGroups } from './consumer-groups.js'
import { DeadMessages } from './dead-messages.js'
import { MessageList } from './message-list.js'
import { MessageLog } from './message-log.js'
import { PatientReads } from './patient-reads.js'
import { QueueOverview } from './queue-overview.js'
import { QueueRemoval } from './queue-removal.js'
import type { Seal } from './seal.js'
import { SystemStatus } from './system-status.js'
import { Throughput } from './throughput.js'
import { Traces } from './traces.js'

export interface AdministrationContext {
  intake: IntakeApi
  /** Of the store's tables, quoted for SQL. */
  schema: string
  /** Null: there is no key. */
  seal: Seal | null
}

export class Administration {
  readonly dead: DeadMessages
  readonly groups: ConsumerGroups
  readonly list: MessageList
  readonly log: MessageLog
  readonly overview: QueueOverview
  readonly removal: QueueRemoval
  readonly status: SystemStatus
  readonly traces: Traces

  constructor(context: AdministrationContext) {
    const reads = new PatientReads(context.intake)
    this.dead = new DeadMessages(context)
    this.groups = new ConsumerGroups(context, reads)
    this.list = new MessageList(context)
    this.log = new MessageLog(context)
    const throughput = new Throughput()
    this.overview = new QueueOverview(context, reads, throughput)
    this.removal = new QueueRemoval(context)
    this.status = new SystemStatus(context, reads, this.overview, throughput)
    this.traces = new Traces(context)
  }
}
