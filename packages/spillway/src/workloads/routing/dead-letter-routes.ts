/** Messages that the routers could not work on, as the broker keeps them. Never shed: this is how they come back. */
import Type, { type Static } from 'typebox'
import type { AppReply as Reply } from '../../http/app.js'
import type { FastifyLike as App } from '../../http/operations-routes.js'
import { sendProblem } from '../../http/problem.js'
import { BrokerFault, type RouterBroker } from '../../index.js'
import type { RoutingWorkload } from './index.js'
import { listLimitDefault, operate, tags, view } from './route-setting.js'

const Ids = Type.Object(
  { ids: Type.Array(Type.String({ pattern: '^\\d{1,19}$' }), { minItems: 1, maxItems: 1_000 }) },
  { additionalProperties: false },
)
const ListQuery = Type.Object(
  {
    limit: Type.Optional(Type.Integer({ minimum: 1, maximum: 200 })),
    cursor: Type.Optional(Type.String({ pattern: '^\\d{1,19}$' })),
  },
  { additionalProperties: false },
)
const path = '/api/v1/routes/dead-letters'

export function addDeadLetters(app: App, { deps: { broker } }: RoutingWorkload): void {
  const withBroker = async (reply: Reply, work: (broker: RouterBroker) => Promise<unknown>): Promise<unknown> => {
    if (broker === null) {
      const detail = 'There is no broker (NATS_URL): the dead letters are those of /api/v1/dead-letters.'
      return sendProblem(reply, { code: 'not_found', detail })
    }
    try {
      return await work(broker)
    } catch (fault) {
      if (!(fault instanceof BrokerFault)) throw fault
      const detail = 'The broker is not reachable now. Try again later.'
      return sendProblem(reply, { code: 'broker_unavailable', detail, retryAfterMs: 5_000 })
    }
  }
  app.get<{ Querystring: Static<typeof ListQuery> }>(
    path,
    {
      schema: { tags, summary: 'Messages that could not be worked on, oldest first', querystring: ListQuery },
      config: view,
    },
    async (request, reply) =>
      withBroker(reply, async (from) => {
        const { limit = listLimitDefault, cursor = null } = request.query
        const found = await from.deadLetters(limit + 1, cursor)
        const items = found.slice(0, limit)
        return {
          items: items.map(({ data, diedAt, ...letter }) => ({
            ...letter,
            died_at: diedAt.toISOString(),
            data_base64: Buffer.from(data).toString('base64'),
          })),
          next_cursor: found.length > limit ? (items.at(-1)?.id ?? null) : null,
        }
      }),
  )
  app.post<{ Body: Static<typeof Ids> }>(
    `${path}/redrive`,
    { schema: { tags, summary: 'Publish them again, whole, oldest first', body: Ids }, config: operate },
    async (request, reply) => withBroker(reply, (from) => from.redrive(request.body.ids)),
  )
  app.delete<{ Body: Static<typeof Ids> }>(
    path,
    { schema: { tags, summary: 'Remove them for good', body: Ids }, config: operate },
    async (request, reply) => withBroker(reply, async (from) => ({ removed: await from.purge(request.body.ids) })),
  )
}
