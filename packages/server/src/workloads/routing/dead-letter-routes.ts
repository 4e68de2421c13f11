/** The broker's dead letters: messages that the routers could not process. Never shed, because this is how they are recovered. */
import { limits } from '@spillway/protocol/wire'
import { fitPage, ProblemError } from 'spillway/workload'
import Type from 'typebox'
import type { RouterBroker } from '../../brokers/nats/broker.js'
import type { BrokerDeadLetter } from '../../brokers/nats/dead-letters.js'
import { BrokerFault } from '../../brokers/nats/faults.js'
import { listLimitDefault, operate, type RoutesContext, route, view } from './route-options.js'

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

/** What `work` gives, or why the broker cannot do it. */
async function withBroker<T>({ broker }: RoutesContext, work: (broker: RouterBroker) => Promise<T>): Promise<T> {
  if (broker === null) {
    const detail = 'There is no broker (NATS_URL): the dead letters are those of /api/v1/dead-letters.'
    throw new ProblemError({ code: 'not_found', detail })
  }
  try {
    return await work(broker)
  } catch (fault) {
    if (!(fault instanceof BrokerFault)) throw fault
    const detail = 'The broker is not reachable now. Try again later.'
    throw new ProblemError({ code: 'broker_unavailable', detail, retryAfterMs: 5_000 })
  }
}

export const deadLetterRoutes = [
  route('GET', path, view, {
    summary: 'Messages that could not be worked on, oldest first',
    query: ListQuery,
    answer: Letters,
    handle: (context, { query: { limit = listLimitDefault, cursor = null } }) =>
      withBroker(context, async (broker) => {
        const found = await listed(broker, limit, cursor)
        const bounds = { limit: found.limit, bytesMax: context.config.server.pageBytesMax }
        const { items, end } = fitPage(found.letters, bounds, toView)
        return { items, next_cursor: end?.id ?? null }
      }),
  }),
  route('GET', `${path}/:id`, view, {
    summary: 'One of them, whole',
    answer: Letter,
    missing: 'dead letter',
    handle: (context, { params }) =>
      withBroker(context, async (broker) => {
        const letter = await broker.deadLetters.get(params.id)
        return letter === null ? null : toView(letter)
      }),
  }),
  route('POST', `${path}/redrive`, operate, {
    summary: 'Publish them again, whole, oldest first',
    body: Ids,
    handle: (context, { body }) => withBroker(context, (broker) => broker.deadLetters.redrive(body.ids)),
  }),
  route('DELETE', path, operate, {
    summary: 'Remove them for good',
    body: Ids,
    handle: (context, { body }) =>
      withBroker(context, async (broker) => ({ removed: await broker.deadLetters.purge(body.ids) })),
  }),
]

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
