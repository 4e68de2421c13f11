/** The routes of generation (docs/reference/http.md). Under `/v1` with OpenAI's formats and errors; the native routes with problem documents. */
import { ChatCompletionRequest, NativeStreamRequest, OpenAiErrorBody } from '@spillway/protocol/schema'
import { generationLimits, threadIdHeader } from '@spillway/protocol/wire'
import type { FastifyLike as App } from 'spillway/workload'
import {
  digestUuid,
  isUuid,
  newOperationId,
  ProblemError,
  parseIdempotencyKey,
  type StreamEntry,
} from 'spillway/workload'
import Type from 'typebox'
import { operatesAll, viewsAll } from '../../auth/identity.js'
import { type MakeRoute, type RouteRequest, routeFor, tableRoutes } from '../../route-table.js'
import type { Asked } from './admission.js'
import type { GenerationDeps } from './index.js'
import { carriedChat } from './request.js'
import { findOpening, type Serving } from './serving.js'
import { UpstreamFault } from './upstream.js'

const visible = /^[\x21-\x7e]+$/
/** Sent by OpenAI's own clients: how long they wait for an answer, in seconds. */
const timeoutHeader = 'x-stainless-timeout'
const patienceSecondsMax = 86_400

const submitters = { role: 'submit' } as const

interface RoutesContext extends GenerationDeps {
  serving: Serving
}

const route: MakeRoute<RoutesContext> = routeFor()

/** With OpenAI's formats and errors. */
const openAiRoutes = (bodyLimitBytes: number) => [
  route('POST', '/v1/chat/completions', submitters, {
    summary: "Generate an answer; with stream true token by token, in OpenAI's form",
    body: ChatCompletionRequest,
    bodyLimitBytes,
    async handle(context, request, reply) {
      const chat = carriedChat(request.body, request.bodyText)
      const format = 'openai'
      const asked = askedBy(request, request.body.model, context, { format, ...chat, threadId: newOperationId() })
      return asked.stream ? context.serving.stream(asked, reply) : context.serving.whole(asked, reply)
    },
  }),
  route(
    'GET',
    '/v1/models',
    {},
    {
      summary: 'The models that can be asked',
      async handle({ upstream }) {
        try {
          return await upstream.models()
        } catch (fault) {
          if (!(fault instanceof UpstreamFault)) throw fault
          throw new ProblemError({
            code: fault.code === 'upstream_timeout' ? 'upstream_timeout' : 'upstream_error',
            detail: fault.error.message,
            openai: fault.error,
          })
        }
      },
    },
  ),
]

const nativeRoutes = (bodyLimitBytes: number) => [
  route('POST', '/api/v1/stream', submitters, {
    summary: 'Generate an answer as a stream that survives a dropped connection',
    body: NativeStreamRequest,
    // A query of the maximum length can exceed the usual body limit when escaped.
    bodyLimitBytes,
    async handle(context, request, reply) {
      const { query, model } = request.body
      const given = request.headers[threadIdHeader.toLowerCase()]
      if (given !== undefined && !isThreadId(given)) throw badThreadId()
      const chat = carriedChat({ model, messages: [{ role: 'user', content: query }], stream: true })
      const threadId = given ?? newOperationId()
      return context.serving.stream(askedBy(request, model, context, { format: 'native', ...chat, threadId }), reply)
    },
  }),
  route(
    'GET',
    '/api/v1/streams/:id',
    {},
    {
      summary: 'Go on reading a stream behind the last event that was received',
      query: Type.Object({
        starting_after: Type.Optional(Type.Integer({ minimum: 0, maximum: Number.MAX_SAFE_INTEGER })),
      }),
      hasNoHead: true,
      async handle(context, request, reply) {
        const entry = await ownStream(context, request, viewsAll)
        const after = startAfter(request)
        // If the end was lost with its log, the reader gets an error. Otherwise it would take its part for the whole.
        const hasEnd = entry.log === 'postgres' ? entry.ended !== null : await isEndedAt(context, entry, after)
        const { last } = entry
        if (hasEnd && after >= last) return reply.code(204).send()
        // The reader would hear nothing until the end, and then miss it. Redis may have lost records; the relay reports that.
        if (entry.log === 'postgres' && after > last) throw badPosition()
        return context.serving.resume(entry, after, reply)
      },
    },
  ),
  route('POST', '/api/v1/streams/:id/cancel', submitters, {
    summary: 'Stop a generation, wherever it runs',
    answer: Type.Object({ id: Type.String(), status: Type.Literal('cancelled') }),
    async handle(context, request) {
      const entry = await ownStream(context, request, operatesAll)
      if (!(await context.serving.cancel(entry))) {
        throw new ProblemError({ code: 'operation_finished', detail: 'The stream has ended already.' })
      }
      return { id: entry.key.id, status: 'cancelled' }
    },
  }),
]

export function generationRoutes(deps: GenerationDeps, serving: Serving): ((app: App) => Promise<void>)[] {
  const { intake, chatBodyBytes } = deps
  const context = { ...deps, serving }
  return [
    tableRoutes(
      { intake, tag: 'OpenAI', errorForm: 'openai', problem: OpenAiErrorBody },
      context,
      openAiRoutes(chatBodyBytes),
    ),
    tableRoutes({ intake, tag: 'streams' }, context, nativeRoutes(chatBodyBytes)),
  ]
}

function askedBy(
  request: RouteRequest,
  model: unknown,
  { upstream }: GenerationDeps,
  of: Pick<Asked, 'format' | 'chat' | 'stream' | 'usage' | 'threadId'>,
): Asked {
  const key = parseIdempotencyKey(request.headers['idempotency-key'])
  if (!key.ok) {
    const errors = [{ path: '/headers/idempotency-key', message: key.detail }]
    throw new ProblemError({ code: 'invalid_request', detail: key.detail, errors })
  }
  const unknown = upstream.unknownModel(String(model))
  if (unknown !== null) throw new ProblemError({ code: 'model_not_found', detail: unknown.message, openai: unknown })
  const seconds = Number(request.headers[timeoutHeader])
  const isGiven = Number.isFinite(seconds) && seconds > 0 && seconds <= patienceSecondsMax
  const keyedOn = key.key === undefined ? '' : digestUuid(request.bodyText ?? of.chat)
  // The framework keeps a request until its answer ends, minutes here. The prompt is needed only until it is stored.
  request.body = undefined
  request.bodyText = undefined
  return {
    ...of,
    identity: request.principal.identity,
    // Both routes share one operation type, so the format keeps their keys apart.
    idempotencyKey: key.key === undefined ? undefined : `${of.format}\0${key.key}`,
    keyedOn,
    traceparent: request.trace.traceparent,
    patienceMs: isGiven ? seconds * 1_000 : null,
  }
}

function isThreadId(value: string | string[]): value is string {
  return typeof value === 'string' && value.length <= generationLimits.threadIdCharacters && visible.test(value)
}

const badThreadId = (): ProblemError =>
  new ProblemError({
    code: 'invalid_request',
    detail: `${threadIdHeader} must have 1 to ${generationLimits.threadIdCharacters} visible ASCII characters.`,
  })

/** Throws if it is unknown, expired, or another caller's. These look the same. */
async function ownStream(
  deps: GenerationDeps,
  { params, principal }: RouteRequest<unknown, unknown, 'id'>,
  mayAll: (principal: RouteRequest['principal']) => boolean,
): Promise<StreamEntry> {
  const id = params.id.toLowerCase()
  const entry = isUuid(id) ? await findOpening(deps, id) : null
  if (entry !== null && (entry.identity === principal.identity || mayAll(principal))) return entry
  throw new ProblemError({ code: 'not_found', detail: 'There is no such stream, or it has expired.' })
}

/** Whether a log other than the store's has the end and nothing after this position. */
async function isEndedAt(deps: GenerationDeps, entry: StreamEntry, after: number): Promise<boolean> {
  const head = await deps.logs.currentHead(entry)
  return head !== undefined && head.end !== null && after >= head.last
}

/** The header comes from browsers that reconnect automatically, and is the newer of the two. */
function startAfter(request: RouteRequest<{ starting_after?: number }>): number {
  const header = request.headers['last-event-id']
  if (header === undefined || header === '') return request.query.starting_after ?? 0
  const after = Number(header)
  if (Number.isSafeInteger(after) && after >= 0 && /^\d+$/.test(String(header))) return after
  throw badPosition()
}

const badPosition = (): ProblemError =>
  new ProblemError({
    code: 'invalid_request',
    detail: 'Last-Event-ID, or starting_after, must be the id of an event of this stream.',
    errors: [{ path: '/headers/last-event-id', message: 'must be a whole number, of an event that was there' }],
  })
