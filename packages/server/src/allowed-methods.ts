import type { FastifyInstance } from 'fastify'
import { pathOf } from 'spillway/workload'

interface KnownRoute {
  segments: readonly string[]
  methods: Set<string>
}

export interface AllowedMethods {
  /** The methods of the path, sorted; empty if no route has it. */
  of(target: string): string[]
}

function matches(segments: readonly string[], path: readonly string[]): boolean {
  for (const [index, segment] of segments.entries()) {
    if (segment === '*') return true
    const given = path[index]
    if (given === undefined) return false
    if (segment.includes(':') ? given === '' : segment !== given) return false
  }
  return segments.length === path.length
}

/**
 * Which methods a path has, for 405 and Allow. Fastify's router knows a path only together with its method, so routes are
 * recorded as they are added. Used only when no route was found.
 */
export function trackAllowedMethods(app: FastifyInstance): AllowedMethods {
  const routes = new Map<string, KnownRoute>()
  app.addHook('onRoute', ({ url, method }) => {
    const known = routes.get(url) ?? { segments: url.split('/').slice(1), methods: new Set() }
    for (const name of Array.isArray(method) ? method : [method]) known.methods.add(name)
    routes.set(url, known)
  })
  return {
    of(target) {
      const path = pathOf(target).split('/').slice(1)
      const found = new Set<string>()
      for (const { segments, methods } of routes.values()) {
        if (matches(segments, path)) for (const method of methods) found.add(method)
      }
      return [...found].sort()
    },
  }
}
