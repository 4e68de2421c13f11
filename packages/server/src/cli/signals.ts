import type { EventEmitter } from 'node:events'
import { constants } from 'node:os'

export interface Closable {
  /** Rejects if the server cannot continue; the server is then closed. */
  started: Promise<void>
  close(): Promise<void>
}

export interface SignalOptions<S> {
  readonly signals: Pick<EventEmitter, 'on' | 'off'>
  readonly exit: (code: number) => void
  readonly onStart: (server: S) => void
  readonly onSignal: (signal: string) => void
}

/**
 * States: starting → running → draining → closed. The first SIGINT or SIGTERM closes the server. During the start the signal
 * is kept until there is something to close, so that an embedded database is never left behind. A second one ends the
 * process at once, with the code that a shell gives a killed process (128 + the signal). A start that can never succeed
 * also closes the server, and its error is thrown.
 */
export async function runUntilSignal<S extends Closable>(
  start: () => Promise<S>,
  { signals, exit, onStart, onSignal }: SignalOptions<S>,
): Promise<void> {
  let signalled = false
  let stop: () => void = () => undefined
  const stopped = new Promise<void>((resolve) => {
    stop = resolve
  })
  const handlers = (['SIGINT', 'SIGTERM'] as const).map((signal) => {
    const handler = () => {
      if (signalled) {
        exit(128 + constants.signals[signal])
        return
      }
      signalled = true
      onSignal(signal)
      stop()
    }
    signals.on(signal, handler)
    return { signal, handler }
  })
  try {
    const server = await start()
    if (!signalled) onStart(server)
    const failed = server.started.then(
      () => stopped,
      (error: unknown) => ({ error }),
    )
    const end = await Promise.race([stopped, failed])
    await server.close()
    if (end !== undefined) throw end.error
  } finally {
    for (const { signal, handler } of handlers) signals.off(signal, handler)
  }
}
