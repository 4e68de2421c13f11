import { objectiveNames } from '@spillway/protocol/wire'
import type { FastifyLike as App } from 'spillway/workload'
import Type from 'typebox'
import { routeFor, tableRoutes } from '../../route-table.js'
import type { Objectives } from './index.js'

const ObjectiveItem = Type.Object({
  name: Type.Enum([...objectiveNames]),
  target: Type.Number({ description: 'Part of what is counted that has to be good' }),
  window: Type.Enum(['1h', '30d']),
  sli: Type.Union([Type.Number(), Type.Null()], { description: 'good by total; null: nothing was counted' }),
  good: Type.Number({ description: 'In the window: messages; of depth, seconds' }),
  total: Type.Number(),
  error_budget_left: Type.Number({ description: '1 all, 0 none, negative when overspent' }),
  burn_rate: Type.Number({ description: 'Error rate of the last hour by the one that is allowed' }),
  met: Type.Boolean(),
})

const list = routeFor<Objectives>()(
  'GET',
  '/api/v1/slo',
  {},
  {
    summary: 'Objectives of the router: indicator, error budget and burn rate, over all processes',
    answer: Type.Object({ objectives: Type.Array(ObjectiveItem) }),
    handle: async (objectives) => ({ objectives: await objectives.read() }),
  },
)

export function objectiveRoutes(objectives: Objectives): (app: App) => Promise<void> {
  return tableRoutes({ intake: objectives.intake, tag: 'objectives' }, objectives, [list])
}
