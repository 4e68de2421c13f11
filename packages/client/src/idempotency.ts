/** A UUID of version 4. Browsers have `crypto.randomUUID` on https and localhost only. */
export function newUuid(): string {
  if (typeof crypto.randomUUID === 'function') return crypto.randomUUID()
  const bytes = crypto.getRandomValues(new Uint8Array(16))
  bytes[6] = ((bytes[6] ?? 0) & 0x0f) | 0x40
  bytes[8] = ((bytes[8] ?? 0) & 0x3f) | 0x80
  const hex = Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('')
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, '$1-$2-$3-$4-')
}

export interface KeyOptions {
  /** The same key and body give the same answer. Default: a new key for each call, the same for all its attempts. */
  idempotencyKey?: string
}

export const keyHeader = ({ idempotencyKey }: KeyOptions): Record<string, string> => ({
  'idempotency-key': idempotencyKey ?? newUuid(),
})
