import { Problem } from '@spillway/protocol/schema'
import { objectiveNames } from '@spillway/protocol/wire'
import type { FastifyLike as App } from 'spillway/workload'
import { refuseUntilReady } from 'spillway/workload'
import Type from 'typebox'
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
const ObjectiveList = Type.Object({ objectives: Type.Array(ObjectiveItem) })

export function objectiveRoutes(objectives: Objectives): (app: App) => Promise<void> {
  return async (app) => {
    app.setSerializerCompiler(() => JSON.stringify)
    refuseUntilReady(app, objectives.intake)
    app.get(
      '/api/v1/slo',
      {
        schema: {
          tags: ['objectives'],
          summary: 'Objectives of the router: indicator, error budget and burn rate, over all processes',
          response: { 200: ObjectiveList, '4xx': Problem, '5xx': Problem },
        },
      },
      async () => ({ objectives: await objectives.read() }),
    )
  }
}
