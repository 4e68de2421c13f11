import type { Hooks, Logger } from './options.js'

/** The text of anything thrown. Reading it may throw, too. */
export function textOf(fault: unknown): string {
  try {
    return String(fault instanceof Error ? fault.message : fault)
  } catch {
    return 'something that is no text'
  }
}

/** Calls user code whose failure must not affect the client; `failed` gets the error. */
export function calling(call: () => unknown, failed: (fault: unknown) => void): void {
  try {
    const given = call()
    if (given instanceof Promise) given.catch(failed)
  } catch (fault) {
    failed(fault)
  }
}

export const warnAbout =
  (logger: Logger) =>
  (fault: unknown): void =>
    logger.warn('a hook failed', { error: textOf(fault) })

const ignored = (): void => undefined

export function safeLogger(logger: Logger): Logger {
  return {
    debug: (message, fields) => calling(() => logger.debug(message, fields), ignored),
    warn: (message, fields) => calling(() => logger.warn(message, fields), ignored),
  }
}

export function safeHooks(hooks: Hooks, logger: Logger): Required<Hooks> {
  const failed = warnAbout(logger)
  return {
    onRetry: (retrying) => calling(() => hooks.onRetry?.(retrying), failed),
    onQueued: (waiting) => calling(() => hooks.onQueued?.(waiting), failed),
  }
}
