/** The tasks of a load, each with a request id of its own, over several tenants. routing.lua makes the same. */
import { randomUUID } from 'node:crypto'

export const decidePath = '/api/v1/routes/decide'
export const routerSubject = 'beamline.router.v1.decide'
export const routerStream = 'SPILLWAY_ROUTER'

/** Each has a rate bucket of its own. */
export const tenants = 100

/** Whichever is chosen, the answer has the same length. */
export const providers = ['north', 'south', 'coast'] as const
export const providerFigures = { priority: 50, expected_latency_ms: 120, expected_cost: 0.25 } as const

/** All but the last part of a UUID: another for every load. */
export const requestPrefix = (): string => randomUUID().slice(0, 24)

export function taskBody(prefix: string, n: number): string {
  const tenant = String((n * 7919) % tenants).padStart(3, '0')
  const id = prefix + n.toString(16).padStart(12, '0')
  return `{"version":"1","request_id":"${id}","tenant_id":"tenant-${tenant}","task":{"type":"text.summary","payload_ref":"s3://harbour/logs/${id}"},"constraints":{"max_latency_ms":500},"metadata":{"origin":"lighthouse"}}`
}
