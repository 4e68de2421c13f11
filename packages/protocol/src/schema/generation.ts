import Type, { type TSchema } from 'typebox'
import { generationLimits } from '../wire/generation.js'

const open = { additionalProperties: true } as const
/** Null means absent. */
const Maybe = <Schema extends TSchema>(schema: Schema) => Type.Optional(Type.Union([schema, Type.Null()]))
const Model = Type.String({ minLength: 1, maxLength: generationLimits.modelCodePoints })

/**
 * The body of `POST /v1/chat/completions`: the members that are read here. All others (tools, temperature, …) go to the
 * upstream unchanged, which checks them.
 */
export const ChatCompletionRequest = Type.Object(
  {
    model: Model,
    messages: Type.Array(
      Type.Object(
        { role: Type.String({ minLength: 1, description: 'system, user, assistant, tool, …' }) },
        { ...open, description: 'With content and whatever else OpenAI defines' },
      ),
      { minItems: 1 },
    ),
    stream: Maybe(Type.Boolean()),
    stream_options: Maybe(Type.Object({ include_usage: Maybe(Type.Boolean()) }, open)),
    n: Type.Optional(
      Type.Union([Type.Literal(1), Type.Null()], { description: 'One answer: a stream has a single order' }),
    ),
    user: Maybe(Type.String()),
  },
  open,
)
export type ChatCompletionRequest = Type.Static<typeof ChatCompletionRequest>

/** The body of `POST /api/v1/stream`. */
export const NativeStreamRequest = Type.Object(
  {
    query: Type.String({ minLength: 1, maxLength: generationLimits.queryCodePoints }),
    model: Model,
    provider: Maybe(
      Type.String({
        minLength: 1,
        maxLength: generationLimits.providerCodePoints,
        description: 'A preference, taken for compatibility: there is one upstream, which is asked in any case',
      }),
    ),
  },
  open,
)
export type NativeStreamRequest = Type.Static<typeof NativeStreamRequest>

const Nullable = Type.Union([Type.String(), Type.Null()])

/** The error body of every answer under `/v1`. */
export const OpenAiErrorBody = Type.Object({
  error: Type.Object({
    message: Type.String(),
    type: Type.String({
      description: 'invalid_request_error, authentication_error, rate_limit_error, server_error, …',
    }),
    param: Nullable,
    code: Nullable,
  }),
})
