import type { IntakeLog } from 'spillway'

/** What an intake has to complain about goes to standard error, which the runner shows when a program fails. */
const complain = (fields: object, message: string): void => {
  const { err, ...rest } = fields as { err?: unknown }
  const why = err instanceof Error ? `: ${err.message}` : ''
  process.stderr.write(`spillway: ${message}${why} ${JSON.stringify(rest)}\n`)
}

const ignore = (): void => undefined

export const warnings: IntakeLog = { debug: ignore, info: ignore, warn: complain, error: complain }
