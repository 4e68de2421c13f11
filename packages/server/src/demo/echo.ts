import type { ServerResponse } from 'node:http'
import { limits } from '@spillway/protocol/wire'
import { sendProblem, whenGone } from 'spillway/workload'
import Type from 'typebox'
import type { App, BodyParser } from '../app.js'

const Query = Type.Object({
  delay_ms: Type.Optional(Type.Integer({ minimum: 0, maximum: limits.demoDelayMsMax })),
  fail: Type.Optional(
    Type.Union([Type.Integer({ minimum: 400, maximum: 599 }), Type.Number({ minimum: 0, maximum: 1 })], {
      description: 'A status (400–599) to answer with, or the probability (0–1) of a 500',
    }),
  ),
})

const echoedHeaders = ['content-type', 'idempotency-key', 'traceparent', 'user-agent'] as const

/** Resolves after the delay, or at once when the client leaves. */
function delayed(delayMs: number, response: ServerResponse): Promise<void> {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer)
      unwatch()
      resolve()
    }
    const timer = setTimeout(end, delayMs)
    const unwatch = whenGone(response, () => setImmediate(end))
  })
}

function statusOf(fail: number | undefined, random: () => number): number {
  if (fail === undefined) return 200
  if (fail > 1) return fail
  return random() < fail ? 500 : 200
}

/**
 * A target for trying `http.request`: answers with what it received. Only on loopback. Public, because Spillway's call
 * carries no key.
 */
export function addDemoEcho(app: App, readBody: BodyParser, random: () => number = Math.random): void {
  app.register(async (scope) => {
    // The echo takes any media type; text is echoed as text.
    scope.addContentTypeParser('*', (request, _payload, done) => {
      readBody(request, (fault, body) => done(fault, body?.toString('utf8')))
    })
    scope.route<{ Querystring: Type.Static<typeof Query> }>({
      method: 'POST',
      url: '/demo/echo',
      config: { public: true },
      schema: {
        querystring: Query,
        tags: ['demo'],
        summary: 'Answers with what it received, late or badly if asked to',
      },
      handler: async (request, reply) => {
        const { delay_ms: delayMs = 0, fail } = request.query
        if (delayMs > 0) await delayed(delayMs, reply.raw)
        // The client is gone.
        if (reply.raw.destroyed) return void reply.hijack()
        const status = statusOf(fail, random)
        if (status === 503 || status === 429) {
          return sendProblem(reply, { code: status === 503 ? 'overloaded' : 'rate_limited', detail: 'As you asked.' })
        }
        const headers = Object.fromEntries(
          echoedHeaders.flatMap((name) => (request.headers[name] === undefined ? [] : [[name, request.headers[name]]])),
        )
        return reply.code(status).send({ method: request.method, headers, body: request.body ?? null })
      },
    })
  })
}
