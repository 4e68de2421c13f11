/**
 * - `data_dir_in_use`      another live Spillway process holds the folder
 * - `data_dir_version`     the cluster was made by another major version of PostgreSQL
 * - `data_dir_damaged`     the folder misses a file that only its first start could make
 * - `data_dir_denied`      this account (or the one the server must run as) cannot use the folder
 * - `platform_unsupported` no PostgreSQL binaries for this platform are installed
 * - `start_failed`, `stop_failed`  the server did not start or stop; `message` carries the end of its log
 */
export type EmbeddedErrorCode =
  | 'data_dir_in_use'
  | 'data_dir_version'
  | 'data_dir_damaged'
  | 'data_dir_denied'
  | 'platform_unsupported'
  | 'start_failed'
  | 'stop_failed'

export class EmbeddedError extends Error {
  override readonly name = 'EmbeddedError'
  readonly code: EmbeddedErrorCode

  constructor(code: EmbeddedErrorCode, message: string, options?: { cause?: unknown }) {
    super(message, options)
    this.code = code
  }
}

/** The errno name of a Node.js system error, or undefined for anything else. */
export function errnoOf(error: unknown): string | undefined {
  if (!(error instanceof Error) || !('code' in error)) return undefined
  return typeof error.code === 'string' ? error.code : undefined
}
