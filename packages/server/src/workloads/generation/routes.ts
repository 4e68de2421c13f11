/** The routes of generation (docs/reference/http.md). Under `/v1` with OpenAI's formats and errors; the native routes with problem documents. */
import {
  ChatCompletionRequest,
  NativeStreamRequest,
  OpenAiErrorBody,
  Problem as ProblemSchema,
} from '@spillway/protocol/schema'
import { generationLimits, threadIdHeader } from '@spillway/protocol/wire'
import type { FastifyLike as App } from 'spillway/workload'
import {
  digestUuid,
  isUuid,
  newOperationId,
  type Problem,
  parseIdempotencyKey,
  refuseUntilReady,
  type StreamEntry,
  sendProblem,
} from 'spillway/workload'
import Type from 'typebox'
import type { AppRequest as Request } from '../../app.js'
import { operatesAll, viewsAll } from '../../auth/identity.js'
import type { Asked } from './admission.js'
import type { GenerationDeps } from './index.js'
import { carriedChat } from './request.js'
import { findOpening, type Serving } from './serving.js'
import { UpstreamFault } from './upstream.js'

const visible = /^[\x21-\x7e]+$/
/** Sent by OpenAI's own clients: how long they wait for an answer, in seconds. */
const timeoutHeader = 'x-stainless-timeout'
const patienceSecondsMax = 86_400

const openaiTags = ['OpenAI']
const nativeTags = ['streams']
const openaiConfig = { role: 'submit', errorForm: 'openai' } as const
const problems = { '4xx': ProblemSchema, '5xx': ProblemSchema }

export function generationRoutes(deps: GenerationDeps, serving: Serving): (app: App) => Promise<void> {
  return async (app) => {
    app.setSerializerCompiler(() => JSON.stringify)
    refuseUntilReady(app, deps.intake)
    addChat(app, deps, serving)
    addModels(app, deps)
    addNative(app, deps, serving)
    addResume(app, deps, serving)
    addCancel(app, deps, serving)
  }
}

function addChat(app: App, deps: GenerationDeps, serving: Serving): void {
  app.post<{ Body: Record<string, unknown> }>(
    '/v1/chat/completions',
    {
      bodyLimit: deps.chatBodyBytes,
      schema: {
        tags: openaiTags,
        summary: "Generate an answer; with stream true token by token, in OpenAI's form",
        body: ChatCompletionRequest,
        response: { '4xx': OpenAiErrorBody, '5xx': OpenAiErrorBody },
      },
      config: openaiConfig,
    },
    async (request, reply) => {
      const chat = carriedChat(request.body, request.bodyText)
      const asked = askedBy(request, request.body.model, deps, {
        format: 'openai',
        ...chat,
        threadId: newOperationId(),
      })
      if ('code' in asked) return sendProblem(reply, asked)
      return asked.stream ? serving.stream(asked, reply) : serving.whole(asked, reply)
    },
  )
}

function addModels(app: App, deps: GenerationDeps): void {
  app.get(
    '/v1/models',
    { schema: { tags: openaiTags, summary: 'The models that can be asked' }, config: { errorForm: 'openai' } },
    async (_request, reply) => {
      try {
        return await deps.upstream.models()
      } catch (fault) {
        if (!(fault instanceof UpstreamFault)) throw fault
        return sendProblem(reply, {
          code: fault.code === 'upstream_timeout' ? 'upstream_timeout' : 'upstream_error',
          detail: fault.error.message,
          openai: fault.error,
        })
      }
    },
  )
}

function addNative(app: App, deps: GenerationDeps, serving: Serving): void {
  app.post<{ Body: NativeStreamRequest }>(
    '/api/v1/stream',
    {
      // A query of the maximum length can exceed the usual body limit when escaped.
      bodyLimit: deps.chatBodyBytes,
      schema: {
        tags: nativeTags,
        summary: 'Generate an answer as a stream that survives a dropped connection',
        body: NativeStreamRequest,
        response: problems,
      },
      config: { role: 'submit' },
    },
    async (request, reply) => {
      const { query, model } = request.body
      const given = request.headers[threadIdHeader.toLowerCase()]
      if (given !== undefined && !isThreadId(given)) return sendProblem(reply, badThreadId)
      const chat = carriedChat({ model, messages: [{ role: 'user', content: query }], stream: true })
      const threadId = given ?? newOperationId()
      const asked = askedBy(request, model, deps, { format: 'native', ...chat, threadId })
      return 'code' in asked ? sendProblem(reply, asked) : serving.stream(asked, reply)
    },
  )
}

function addResume(app: App, deps: GenerationDeps, serving: Serving): void {
  app.get<{ Params: { id: string }; Querystring: { starting_after?: number } }>(
    '/api/v1/streams/:id',
    {
      // A HEAD would hold open a stream that nobody reads.
      exposeHeadRoute: false,
      schema: {
        tags: nativeTags,
        summary: 'Go on reading a stream behind the last event that was received',
        params: Type.Object({ id: Type.String() }),
        querystring: Type.Object({
          starting_after: Type.Optional(Type.Integer({ minimum: 0, maximum: Number.MAX_SAFE_INTEGER })),
        }),
        response: problems,
      },
    },
    async (request, reply) => {
      const entry = await ownStream(deps, request, viewsAll)
      if (entry === null) return sendProblem(reply, noStream)
      const after = startAfter(request)
      if (typeof after !== 'number') return sendProblem(reply, after)
      // If the end was lost with its log, the reader gets an error. Otherwise it would take its part for the whole.
      const hasEnd = entry.log === 'postgres' ? entry.ended !== null : await isEndedAt(deps, entry, after)
      const { last } = entry
      if (hasEnd && after >= last) return reply.code(204).send()
      // The reader would hear nothing until the end, and then miss it. Redis may have lost records; the relay reports that.
      if (entry.log === 'postgres' && after > last) return sendProblem(reply, badPosition)
      return serving.resume(entry, after, reply)
    },
  )
}

function addCancel(app: App, deps: GenerationDeps, serving: Serving): void {
  app.post<{ Params: { id: string } }>(
    '/api/v1/streams/:id/cancel',
    {
      schema: {
        tags: nativeTags,
        summary: 'Stop a generation, wherever it runs',
        params: Type.Object({ id: Type.String() }),
        response: { 200: Type.Object({ id: Type.String(), status: Type.Literal('cancelled') }), ...problems },
      },
      config: { role: 'submit' },
    },
    async (request, reply) => {
      const entry = await ownStream(deps, request, operatesAll)
      if (entry === null) return sendProblem(reply, noStream)
      if (!(await serving.cancel(entry))) {
        return sendProblem(reply, { code: 'operation_finished', detail: 'The stream has ended already.' })
      }
      return { id: entry.key.id, status: 'cancelled' }
    },
  )
}

function askedBy(
  request: Request & { body: unknown },
  model: unknown,
  { upstream }: GenerationDeps,
  of: Pick<Asked, 'format' | 'chat' | 'stream' | 'usage' | 'threadId'>,
): Asked | Problem {
  const key = parseIdempotencyKey(request.headers['idempotency-key'])
  if (!key.ok) {
    const errors = [{ path: '/headers/idempotency-key', message: key.detail }]
    return { code: 'invalid_request', detail: key.detail, errors }
  }
  const unknown = upstream.unknownModel(String(model))
  if (unknown !== null) return { code: 'model_not_found', detail: unknown.message, openai: unknown }
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

const badThreadId: Problem = {
  code: 'invalid_request',
  detail: `${threadIdHeader} must have 1 to ${generationLimits.threadIdCharacters} visible ASCII characters.`,
}

const noStream: Problem = { code: 'not_found', detail: 'There is no such stream, or it has expired.' }

/** Null: unknown, expired, or another caller's. These look the same. */
async function ownStream(
  deps: GenerationDeps,
  request: Request & { params: { id: string } },
  mayAll: (principal: Request['principal']) => boolean,
): Promise<StreamEntry | null> {
  const id = request.params.id.toLowerCase()
  if (!isUuid(id)) return null
  const entry = await findOpening(deps, id)
  if (entry === null) return null
  const { principal } = request
  return entry.identity === principal.identity || mayAll(principal) ? entry : null
}

/** Whether a log other than the store's has the end and nothing after this position. */
async function isEndedAt(deps: GenerationDeps, entry: StreamEntry, after: number): Promise<boolean> {
  const head = await deps.logs.currentHead(entry)
  return head !== undefined && head.end !== null && after >= head.last
}

/** The header comes from browsers that reconnect automatically, and is the newer of the two. */
function startAfter(request: Request & { query: { starting_after?: number } }): number | Problem {
  const header = request.headers['last-event-id']
  if (header === undefined || header === '') return request.query.starting_after ?? 0
  const after = Number(header)
  if (Number.isSafeInteger(after) && after >= 0 && /^\d+$/.test(String(header))) return after
  return badPosition
}

const badPosition: Problem = {
  code: 'invalid_request',
  detail: 'Last-Event-ID, or starting_after, must be the id of an event of this stream.',
  errors: [{ path: '/headers/last-event-id', message: 'must be a whole number, of an event that was there' }],
}
