import { alertNames, alertStatuses, limits } from '@spillway/protocol/wire'
import type { FastifyLike as App } from 'spillway/workload'
import { cursorOf, fitPage, invalidCursor, ProblemError, placeOf } from 'spillway/workload'
import Type from 'typebox'
import { routeFor, tableRoutes } from '../../route-table.js'
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
  const list = routeFor<Alerts>()(
    'GET',
    '/api/v1/alerts',
    { role: 'view', wholeServer: true },
    {
      summary: 'Alerts that fired and were resolved, newest first; with active=true, each as it is now',
      query: ListAlertsQuery,
      answer: AlertPage,
      async handle({ records }, { query }) {
        const { status = null, name = null, active = false, limit = listLimitDefault, cursor } = query
        const before = cursor === undefined ? null : placeOf(cursor)
        // More than 18 digits may not fit into a bigint.
        if (before !== null && !/^\d{1,18}$/.test(before)) throw new ProblemError(invalidCursor)
        const rows = await records.list({ status, name, active }, limit, before)
        const { items, end } = fitPage(rows, { limit, bytesMax: pageBytesMax }, ({ view }) => view)
        return { items, next_cursor: end === null ? null : cursorOf(end.seq) }
      },
    },
  )
  return tableRoutes({ intake: alerts.intake, tag: 'alerts' }, alerts, [list])
}
