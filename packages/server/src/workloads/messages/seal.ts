/**
 * Encryption at rest: AES-256-GCM with a new nonce for each message, bound to its partition and id, so that a payload moved
 * to another row does not open. A failure is thrown: nothing is stored or returned instead.
 */
import { createCipheriv, createDecipheriv, randomBytes } from 'node:crypto'

const algorithm = 'aes-256-gcm'
const nonceBytes = 12
const tagBytes = 16
export const keyBytes = 32

/** The row that a sealed payload belongs to. */
export interface SealedRow {
  partition: string
  id: string
}

const bound = ({ partition, id }: SealedRow): Buffer => Buffer.from(`${partition}/${id}`)

export class SealError extends Error {
  override readonly name = 'SealError'
  readonly code = 'sealed'
}

export class Seal {
  readonly #key: Uint8Array

  constructor(key: Uint8Array) {
    if (key.length !== keyBytes) throw new RangeError(`the key has ${key.length} bytes, not ${keyBytes}`)
    this.#key = key
  }

  /** Nonce, ciphertext and tag, as base64. */
  seal(text: string, row: SealedRow): string {
    const nonce = randomBytes(nonceBytes)
    const cipher = createCipheriv(algorithm, this.#key, nonce).setAAD(bound(row))
    return Buffer.concat([nonce, cipher.update(text, 'utf8'), cipher.final(), cipher.getAuthTag()]).toString('base64')
  }

  open(sealed: string, row: SealedRow): string {
    const bytes = Buffer.from(sealed, 'base64')
    try {
      const decipher = createDecipheriv(algorithm, this.#key, bytes.subarray(0, nonceBytes))
        .setAAD(bound(row))
        .setAuthTag(bytes.subarray(-tagBytes))
      return Buffer.concat([decipher.update(bytes.subarray(nonceBytes, -tagBytes)), decipher.final()]).toString('utf8')
    } catch (cause) {
      throw new SealError('a message could not be decrypted: it was changed, or sealed with another key', { cause })
    }
  }
}
