/** All workloads, in the order in which they are defined: one that uses another's offers comes after it. */
import type { SqlModule } from 'spillway/workload'
import type { Workload } from './workload.js'
import { alerts } from './workloads/alerts/index.js'
import { generation } from './workloads/generation/index.js'
import { httpRequest } from './workloads/http-request/index.js'
import { messages } from './workloads/messages/index.js'
import { objectives } from './workloads/objectives/index.js'
import { petitions } from './workloads/petitions/index.js'
import { routing } from './workloads/routing/index.js'

export const workloads: readonly Workload[] = [
  httpRequest,
  petitions,
  messages,
  alerts,
  objectives,
  routing,
  generation,
]

/** The tables and functions of the server's workloads. A library user's database has only the core's. */
export const workloadSql: readonly SqlModule[] = workloads.flatMap(({ sql }) => sql ?? [])
