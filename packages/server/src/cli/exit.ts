/** The exit codes of every command. */
export const exitCodes = {
  done: 0,
  /** The command was understood but did not succeed. */
  failed: 1,
  /** The command was not understood; nothing was done. */
  usage: 2,
} as const

/** Shown to the user as it is, without a stack. */
export class UsageError extends Error {
  override readonly name = 'UsageError'
  readonly code = 'usage'
}
