/** What the administration's handlers work with, and the rows of its route table. */
import { mayUseQueue } from 'spillway/workload'
import { type MakeRoute, type RouteRequest, routeFor } from '../../../route-table.js'
import type { Messages } from '../context.js'
import type { Statements } from './statements.js'
import type { Throughput } from './throughput.js'

export interface Admin extends Messages, Statements {
  throughput: Throughput
}

export const route: MakeRoute<Admin> = routeFor()

export const consumers = { role: 'consume' } as const
export const readers = { role: ['consume', 'view'] } as const
export const viewers = { role: 'view' } as const
export const operators = { role: 'operate' } as const

export const mayUse = ({ principal }: Pick<RouteRequest, 'principal'>, queue: string): boolean =>
  mayUseQueue(principal.queues, queue)
