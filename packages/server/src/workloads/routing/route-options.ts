/** Options that the routing routes share. */
import { RoutingProblem } from '@spillway/protocol/schema'

export const tags = ['routing']
export const problems = { '4xx': RoutingProblem, '5xx': RoutingProblem }
export const listLimitDefault = 50
export const anyone = { errorForm: 'object' } as const
/** Policies, blocks and the broker's dead letters belong to the whole server. */
export const operate = { role: 'operate', wholeServer: true, errorForm: 'object' } as const
export const view = { role: 'view', wholeServer: true, errorForm: 'object' } as const

/** The options of a route: who may call it, and how the API description shows it. */
export function options<Config extends object>(config: Config, summary: string, schema: object, answers?: object) {
  const response = answers === undefined ? {} : { response: { ...answers, ...problems } }
  return { schema: { tags, summary, ...schema, ...response }, config }
}
