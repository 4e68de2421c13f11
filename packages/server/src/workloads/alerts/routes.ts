import { Problem } from '@spillway/protocol/schema'
import { alertNames, alertStatuses, limits } from '@spillway/protocol/wire'
import type { FastifyLike as App } from 'spillway/workload'
import { cursorOf, fitPage, placeOf, refuseUntilReady, sendProblem } from 'spillway/workload'
import Type, { type Static } from 'typebox'
import { deliveryStates } from './alert-log.js'
import { AlertNotice } from './delivery.js'
import type { Alerts } from './index.js'

const listLimitDefault = 50

const ListAlertsQuery = Type.Object({
  status: Type.Optional(Type.Enum([...alertStatuses])),
  name: Type.Optional(Type.Enum([...alertNames])),
  active: Type.Optional(
    Type.Boolean({ description: 'true: each alert once, as it is now, instead of every change of it' }),
  ),
  limit: Type.Optional(Type.Integer({ minimum: 1, maximum: limits.listItemsMax, default: listLimitDefault })),
  cursor: Type.Optional(Type.String({ minLength: 1, maxLength: 1_024, description: 'next_cursor of the page before' })),
})

const AlertItem = Type.Object({
  id: Type.String({ format: 'uuid', description: 'Of the change' }),
  ...AlertNotice.properties,
  alert_name: Type.Enum([...alertNames]),
  delivery: Type.Union([Type.Enum([...deliveryStates]), Type.Null()], {
    description: 'What became of it at ALERT_WEBHOOK_URL; none: there is none; null: not known any more',
  }),
})

const AlertPage = Type.Object({
  items: Type.Array(AlertItem),
  next_cursor: Type.Union([Type.String(), Type.Null()]),
})

export function alertRoutes(alerts: Alerts, pageBytesMax: number): (app: App) => Promise<void> {
  return async (app) => {
    app.setSerializerCompiler(() => JSON.stringify)
    refuseUntilReady(app, alerts.intake)
    app.get<{ Querystring: Static<typeof ListAlertsQuery> }>(
      '/api/v1/alerts',
      {
        schema: {
          tags: ['alerts'],
          summary: 'Alerts that fired and were resolved, newest first; with active=true, each as it is now',
          querystring: ListAlertsQuery,
          response: { 200: AlertPage, '4xx': Problem, '5xx': Problem },
        },
        config: { role: 'view', wholeServer: true },
      },
      async (request, reply) => {
        const { status = null, name = null, active = false, limit = listLimitDefault, cursor } = request.query
        const before = cursor === undefined ? null : placeOf(cursor)
        // More than 18 digits may not fit into a bigint.
        if (before !== null && !/^\d{1,18}$/.test(before)) {
          return sendProblem(reply, {
            code: 'invalid_request',
            detail: 'The cursor is invalid.',
            errors: [{ path: '/cursor', message: 'take next_cursor of the previous page' }],
          })
        }
        const rows = await alerts.records.list({ status, name, active }, limit, before)
        const { items, end } = fitPage(rows, { limit, bytesMax: pageBytesMax }, ({ view }) => view)
        return { items, next_cursor: end === null ? null : cursorOf(end.seq) }
      },
    )
  }
}
