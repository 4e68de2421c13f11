/** The broker's dead letters: messages that the routers could not process. Never shed, because this is how they are recovered. */
import { limits } from '@spillway/protocol/wire'
import type { FastifyLike as App } from 'spillway/workload'
import { fitPage, sendProblem } from 'spillway/workload'
import Type, { type Static } from 'typebox'
import type { AppReply as Reply } from '../../app.js'
import type { RouterBroker } from '../../brokers/nats/broker.js'
import type { BrokerDeadLetter } from '../../brokers/nats/dead-letters.js'
import { BrokerFault } from '../../brokers/nats/faults.js'
import type { RoutingParts } from './context.js'
import { listLimitDefault, operate, options, view } from './route-options.js'

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
const Left = (what: string) => Type.Optional(Type.Integer({ description: `Bytes of ${what}, left out of the list` }))
const Letter = Type.Object({
  id: Type.String(),
  reason: Type.String(),
  detail: Type.String(),
  deliveries: Type.Integer(),
  died_at: Type.String({ format: 'date-time' }),
  headers: Type.Union([Type.Record(Type.String(), Type.String()), Type.Null()]),
  data_base64: Type.Union([Type.String(), Type.Null()]),
  headers_bytes: Left(`headers of more than ${limits.listPayloadBytes} (null)`),
  data_bytes: Left(`a message of more than ${limits.listPayloadBytes} (null)`),
  truncated: Type.Optional(Type.Literal(true, { description: 'Something is left out; the single item has it whole' })),
})
const Letters = Type.Object({ items: Type.Array(Letter), next_cursor: Type.Union([Type.String(), Type.Null()]) })
const path = '/api/v1/routes/dead-letters'
/** The broker returns only complete messages: a page of long ones ends after this many bytes. */
const readBytesMax = 33_554_432

export function addDeadLetters(app: App, { broker, config }: RoutingParts): void {
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
    options(view, 'Messages that could not be worked on, oldest first', { querystring: ListQuery }, { 200: Letters }),
    async (request, reply) =>
      withBroker(reply, async (from) => {
        const { limit = listLimitDefault, cursor = null } = request.query
        const found = await listed(from, limit, cursor)
        const { items, end } = fitPage(
          found.letters,
          { limit: found.limit, bytesMax: config.server.pageBytesMax },
          toView,
        )
        return { items, next_cursor: end?.id ?? null }
      }),
  )
  app.get<{ Params: { id: string } }>(
    `${path}/:id`,
    options(view, 'One of them, whole', {}, { 200: Letter }),
    async (request, reply) =>
      withBroker(reply, async (from) => {
        const letter = await from.deadLetters.get(request.params.id)
        if (letter === null) return sendProblem(reply, { code: 'not_found', detail: 'There is no such dead letter.' })
        return toView(letter)
      }),
  )
  app.post<{ Body: Static<typeof Ids> }>(
    `${path}/redrive`,
    options(operate, 'Publish them again, whole, oldest first', { body: Ids }),
    async (request, reply) => withBroker(reply, (from) => from.deadLetters.redrive(request.body.ids)),
  )
  app.delete<{ Body: Static<typeof Ids> }>(
    path,
    options(operate, 'Remove them for good', { body: Ids }),
    async (request, reply) =>
      withBroker(reply, async (from) => ({ removed: await from.deadLetters.purge(request.body.ids) })),
  )
}

/** The letters of a page, plus one more if there are more; `limit`: how many belong to the page. */
async function listed(
  broker: RouterBroker,
  limit: number,
  cursor: string | null,
): Promise<{ letters: BrokerDeadLetter[]; limit: number }> {
  const letters: BrokerDeadLetter[] = []
  for (let read = 0; letters.length <= limit; ) {
    const [next] = await broker.deadLetters.list(1, letters.at(-1)?.id ?? cursor, limits.listPayloadBytes)
    if (next === undefined) break
    letters.push(next)
    if (read > readBytesMax) return { letters, limit: letters.length - 1 }
    read += next.dataBytes + next.headersBytes
  }
  return { letters, limit }
}

function toView({ data, dataBytes, diedAt, headers, headersBytes, ...letter }: BrokerDeadLetter) {
  const isDataLeftOut = data.length < dataBytes
  const areHeadersLeftOut = headersBytes > 2 && Object.keys(headers).length === 0
  return {
    ...letter,
    headers: areHeadersLeftOut ? null : headers,
    died_at: diedAt.toISOString(),
    data_base64: isDataLeftOut ? null : Buffer.from(data).toString('base64'),
    ...(areHeadersLeftOut && { headers_bytes: headersBytes }),
    ...(isDataLeftOut && { data_bytes: dataBytes }),
    ...((isDataLeftOut || areHeadersLeftOut) && { truncated: true }),
  }
}
