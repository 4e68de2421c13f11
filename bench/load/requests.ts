/** The requests that hand over operations; operations.lua makes the same for wrk. */
import type { Load } from './load.js'

/** Where the operations would be sent if anything drained them. Nothing does while accepting is measured. */
export const targetOf = (origin: string): string => `${origin}/demo/echo`

let loads = 0

/** Unique for each load, also among earlier runs on the same database. */
export function uniquePrefix(): string {
  loads += 1
  return `${process.pid.toString(36)}${Date.now().toString(36)}x${loads.toString(36).padStart(3, '0')}`
}

export interface Request {
  method: string
  path: string
  headers: Record<string, string>
  body: string
}

/** All of one length, none like another. */
export function requestMaker(load: Load): () => Request {
  const prefix = uniquePrefix()
  const url = targetOf(load.origin)
  let n = 0
  return () => {
    n += 1
    const lane = String((n * 7919) % load.lanes).padStart(6, '0')
    const ref = `${prefix}-${String(n).padStart(9, '0')}`
    return {
      method: 'POST',
      path: load.path,
      headers: {
        'content-type': 'application/json',
        ...(load.async === true && { prefer: 'respond-async' }),
        ...(load.keyed === true && { 'idempotency-key': ref }),
        ...(load.identified === true && { 'x-user': `user-${lane}` }),
      },
      body: JSON.stringify({
        type: 'http.request',
        queue: 'bench',
        partition: `lane-${lane}`,
        payload: { url, body: { ref } },
      }),
    }
  }
}
