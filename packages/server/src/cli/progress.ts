import type { Terminal } from './terminal.js'

export interface Progress {
  /** `done` so far; `total` if known. */
  update(done: number, total: number | null): void
  /** Ends the line, so that the next output starts on a new one. */
  end(): void
}

/** On a terminal one line that is rewritten; elsewhere a plain line for each update, suitable for a log. */
export function startProgress(terminal: Terminal, label: string): Progress {
  let written = false
  return {
    update(done, total) {
      const text = `${label}: ${done}${total === null ? '' : ` of ${Math.max(total, done)}`}`
      terminal.err(terminal.interactive ? `\r\u001b[K${text}` : `${text}\n`)
      written = true
    },
    end() {
      if (written && terminal.interactive) terminal.err('\n')
    },
  }
}
