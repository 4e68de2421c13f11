import Type from 'typebox'
import { type ProblemCode, problems } from '../wire/codes.js'

const codes = Object.keys(problems) as ProblemCode[]

/** RFC 9457, with our members. Open: some problems have more. */
export const Problem = Type.Object(
  {
    type: Type.String(),
    title: Type.String(),
    status: Type.Integer(),
    detail: Type.String(),
    instance: Type.String({ description: 'The path of the request' }),
    code: Type.Enum(codes),
    trace_id: Type.String(),
    retry_after_seconds: Type.Optional(
      Type.Integer({ minimum: 1, description: 'On 429 and 503; equal to Retry-After' }),
    ),
    errors: Type.Optional(
      Type.Array(Type.Object({ path: Type.String({ description: 'A JSON pointer' }), message: Type.String() })),
    ),
  },
  { additionalProperties: true },
)
