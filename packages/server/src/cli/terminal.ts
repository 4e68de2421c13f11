/** A command's view of the outside: output, and whether a person is watching. Tests pass their own. */
export interface Terminal {
  /** Standard output: results only, so that they can be piped. */
  out(text: string): void
  /** Standard error: progress, warnings, errors. */
  err(text: string): void
  /** Whether standard error is a terminal. */
  readonly interactive: boolean
}

export const processTerminal: Terminal = {
  out: (text) => void process.stdout.write(text),
  err: (text) => void process.stderr.write(text),
  interactive: process.stderr.isTTY === true,
}
