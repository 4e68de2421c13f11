import type { FastifyBaseLogger, FastifyInstance, FastifySchema, RouteOptions } from 'fastify'
import { answerFault, type Problem, sendProblem, traceIdOf } from 'spillway/workload'
import type { App } from './app.js'

interface DocumentedRoute {
  method: RouteOptions['method']
  url: string
  schema: FastifySchema
}

/** Assets and the page itself are not part of the API. */
function isDocumented({ url, method, schema }: RouteOptions): boolean {
  return schema !== undefined && method !== 'HEAD' && !url.includes('*')
}

const nothingHere: Problem = { code: 'not_found', detail: 'There is nothing at this path.' }

/** A path that the file server refuses: with `..`, a NUL or a dot file. Its errors carry a status. */
function isRefusedPath(fault: unknown): boolean {
  if (!(fault instanceof Error) || !('statusCode' in fault)) return false
  return fault.statusCode === 400 || fault.statusCode === 403 || fault.statusCode === 404
}

/**
 * The documentation is a separate application, built on its first request, so that a server whose documentation nobody
 * reads does not load the generator and the page. It uses the same schemas as the routes.
 */
async function buildDocumentation(
  routes: readonly DocumentedRoute[],
  version: string,
  log: FastifyBaseLogger,
): Promise<FastifyInstance> {
  const [{ default: Fastify, LogController }, { default: swagger }, { default: swaggerUi }] = await Promise.all([
    import('fastify'),
    import('@fastify/swagger'),
    import('@fastify/swagger-ui'),
  ])
  const documentation = Fastify({
    loggerInstance: log,
    logController: new LogController({ disableRequestLogging: true }),
    genReqId: ({ headers }) => traceIdOf(headers.traceparent),
  })
  documentation.setErrorHandler((fault, request, reply) => {
    if (isRefusedPath(fault)) sendProblem(reply, nothingHere)
    else answerFault(fault, request, reply)
  })
  documentation.setNotFoundHandler((_, reply) => {
    sendProblem(reply, nothingHere)
  })
  // The routes are only described, never called, so nothing needs to be compiled.
  documentation.setValidatorCompiler(() => () => true)
  documentation.setSerializerCompiler(() => JSON.stringify)
  await documentation.register(swagger, {
    openapi: {
      openapi: '3.1.0',
      info: {
        title: 'Spillway',
        version,
        description:
          'Every request is answered with done (200/201), queued (202 and a ticket) or not now (429/503 and when to come back). Errors are problem documents (RFC 9457).',
      },
      components: { securitySchemes: { bearer: { type: 'http', scheme: 'bearer' } } },
      security: [{ bearer: [] }, {}],
    },
  })
  await documentation.register(swaggerUi, {
    routePrefix: '/docs',
    staticCSP: true,
    // With it a server reached over plain HTTP by a name other than localhost could not load its own assets.
    transformStaticCSP: (policy) => policy.replace(/\s*upgrade-insecure-requests;?/u, ''),
    theme: { title: 'Spillway API' },
    // Without the top bar, which shows another project's logo.
    uiConfig: { layout: 'BaseLayout' },
  })
  for (const { method, url, schema } of routes) {
    documentation.route({ method, url, schema, handler: async () => undefined })
  }
  await documentation.ready()
  return documentation
}

/** Adds who may call the route. This is the one place that lists the roles of all routes. */
function withAccess(schema: FastifySchema, config: RouteOptions['config']): FastifySchema {
  const { role, public: isPublic, wholeServer } = config ?? {}
  const roles = role === undefined ? [] : [role].flat().filter((name) => name !== 'operate')
  const needed =
    role === undefined ? 'Any role' : `Role ${[...roles, 'operate'].map((name) => `\`${name}\``).join(' or ')}`
  const { description } = schema as { description?: string }
  const access = isPublic === true ? 'Open to all' : needed
  const bound = wholeServer === true ? '; refused for keys that are bound to queues' : ''
  return { ...schema, description: `${description === undefined ? '' : `${description}\n\n`}${access}${bound}.` }
}

/** Runs at the first call; a failure is retried at the next. */
function once<T>(make: () => Promise<T>): () => Promise<T> {
  let made: Promise<T> | undefined
  return () => {
    made ??= make().catch((fault: unknown) => {
      made = undefined
      throw fault
    })
    return made
  }
}

/** Call before the routes that are to be documented. */
export function addOpenApi(app: App, version: string): void {
  const routes: DocumentedRoute[] = []
  app.addHook('onRoute', (route) => {
    if (isDocumented(route) && route.schema !== undefined) {
      routes.push({ method: route.method, url: route.url, schema: withAccess(route.schema, route.config) })
    }
  })

  let documentation: FastifyInstance | undefined
  const load = once(async () => {
    documentation = await buildDocumentation(routes, version, app.log)
    return documentation
  })

  // Built once and sent by this app, whose answers count in the budget: the description is long. Bytes are shared by all
  // answers; a text would be copied for each.
  const json = once(async () => Buffer.from(JSON.stringify((await load()).swagger())))
  const yaml = once(async () => Buffer.from((await load()).swagger({ yaml: true })))
  for (const [url, type, bytes] of [
    ['/openapi.json', 'application/json; charset=utf-8', json],
    ['/docs/json', 'application/json; charset=utf-8', json],
    ['/docs/yaml', 'application/x-yaml', yaml],
  ] as const) {
    app.get(url, { config: { public: true } }, async (_, reply) => reply.type(type).send(await bytes()))
  }
  for (const url of ['/docs', '/docs/*']) {
    app.get(url, { config: { public: true } }, async (request, reply) => {
      const pages = await load()
      for (const [name, value] of Object.entries(reply.getHeaders())) {
        if (value !== undefined) reply.raw.setHeader(name, value)
      }
      reply.hijack()
      pages.routing(request.raw, reply.raw)
    })
  }
  app.addHook('onClose', async () => {
    await documentation?.close()
  })
}
