import type { FastifyInstance } from 'fastify'
import { pathOf } from 'spillway/workload'

function matches(segments: readonly string[], path: readonly string[]): boolean {
  for (const [index, segment] of segments.entries()) {
    if (segment === '*') return true
    const given = path[index]
    if (given === undefined) return false
    if (segment.includes(':') ? given === '' : segment !== given) return false
  }
  return segments.length === path.length
}

const segmentsOf = (path: string): string[] => path.split('/').slice(1)

/**
 * Which methods a path has, sorted, for 405 and Allow; none if no route has it. Fastify's router knows a path only together
 * with its method, so routes are recorded as they are added. Used only when no route was found.
 */
export function trackAllowedMethods(app: FastifyInstance): (target: string) => string[] {
  const routes: { segments: readonly string[]; methods: readonly string[] }[] = []
  app.addHook('onRoute', ({ url, method }) => {
    routes.push({ segments: segmentsOf(url), methods: [method].flat() })
  })
  return (target) => {
    const path = segmentsOf(pathOf(target))
    const found = routes.filter(({ segments }) => matches(segments, path))
    return [...new Set(found.flatMap(({ methods }) => methods))].sort()
  }
}
