/**
 * Every process that the benchmark starts, so that none outlives it. A `Children` belongs to one section: what the
 * section leaves running is stopped when it ends, and a section that ended (late, after its timeout) starts nothing more.
 */
import { type ChildProcess, spawn } from 'node:child_process'
import type { BenchProcess } from './section.js'

export interface SpawnOptions {
  readonly command: string
  readonly args: readonly string[]
  readonly env: Readonly<Record<string, string>>
  readonly cwd: string
  /** In messages: `programs/echo.ts`. */
  readonly name: string
}

export interface Child extends BenchProcess {
  stderr(): string
  /** Resolves with the first match on standard error; some programs greet there. */
  errorLine(pattern: RegExp, timeoutMs?: number): Promise<RegExpExecArray>
  /** The exit code, null when a signal ended it. */
  readonly ended: Promise<number | null>
}

const lineTimeoutMs = 60_000
const stopGraceMs = 10_000
/** Of what a process wrote to standard error, as much as explains its end. */
const explanationCharacters = 4_000

export class Children {
  readonly #living = new Set<Started>()
  #closed = false

  start(options: SpawnOptions): Child {
    if (this.#closed) throw new Error(`${options.name} is not started: its section is over`)
    const child = new Started(options)
    this.#living.add(child)
    void child.ended.then(() => this.#living.delete(child))
    return child
  }

  /** Stops all, and starts none from now on. */
  async close(): Promise<void> {
    this.#closed = true
    await Promise.all([...this.#living].map((child) => child.stop()))
  }

  /** Without grace, for a person who presses Ctrl-C twice. */
  killNow(): void {
    this.#closed = true
    for (const child of this.#living) child.kill()
  }
}

type Source = 'stdout' | 'stderr'

class Started implements Child {
  readonly pid: number
  readonly ended: Promise<number | null>
  readonly #child: ChildProcess
  readonly #name: string
  readonly #written: Record<Source, string> = { stdout: '', stderr: '' }
  readonly #watchers = new Set<() => void>()
  #isGone = false
  #failure: Error | null = null

  constructor({ command, args, env, cwd, name }: SpawnOptions) {
    this.#name = name
    const child = spawn(command, args, {
      cwd,
      env: { ...env },
      stdio: ['ignore', 'pipe', 'pipe'],
      // In a process group of its own: Ctrl-C in a terminal comes to the runner, which stops things in order.
      detached: process.platform !== 'win32',
    })
    this.#child = child
    this.pid = child.pid ?? 0
    for (const source of ['stdout', 'stderr'] as const) {
      child[source].setEncoding('utf8').on('data', (text: string) => {
        this.#written[source] += text
        this.#look()
      })
    }
    this.ended = new Promise((resolve) => {
      const end = (code: number | null): void => {
        this.#isGone = true
        this.#look()
        resolve(code)
      }
      child.once('error', (fault) => {
        this.#failure = fault
        end(null)
      })
      child.once('close', (code) => end(code))
    })
  }

  #look(): void {
    for (const watcher of this.#watchers) watcher()
  }

  stdout(): string {
    return this.#written.stdout
  }

  stderr(): string {
    return this.#written.stderr
  }

  line(pattern: RegExp, timeoutMs = lineTimeoutMs): Promise<RegExpExecArray> {
    return this.#find('stdout', pattern, timeoutMs)
  }

  errorLine(pattern: RegExp, timeoutMs = lineTimeoutMs): Promise<RegExpExecArray> {
    return this.#find('stderr', pattern, timeoutMs)
  }

  #find(source: Source, pattern: RegExp, timeoutMs: number): Promise<RegExpExecArray> {
    return new Promise((resolve, reject) => {
      const finish = (settle: () => void): void => {
        clearTimeout(timer)
        this.#watchers.delete(look)
        settle()
      }
      const look = (): void => {
        const found = firstMatch(this.#written[source], pattern, this.#isGone)
        if (found !== null) finish(() => resolve(found))
        else if (this.#isGone) finish(() => reject(this.#explain('ended before it wrote', pattern)))
      }
      const timer = setTimeout(
        () => finish(() => reject(this.#explain(`did not within ${timeoutMs} ms write`, pattern))),
        timeoutMs,
      )
      this.#watchers.add(look)
      look()
    })
  }

  #explain(what: string, pattern: RegExp): Error {
    const said = this.#written.stderr.slice(-explanationCharacters).trim()
    return new Error(`${this.#name} ${what} ${pattern}${said === '' ? '' : `\n${said}`}`, {
      ...(this.#failure !== null && { cause: this.#failure }),
    })
  }

  kill(): void {
    if (!this.#isGone) this.#child.kill('SIGKILL')
  }

  async stop(): Promise<void> {
    if (this.#isGone) return
    this.#child.kill('SIGTERM')
    const timer = setTimeout(() => this.kill(), stopGraceMs)
    await this.ended
    clearTimeout(timer)
  }
}

/** Whole lines only, but for a process that is gone: half a line would give half a number. */
function firstMatch(text: string, pattern: RegExp, isGone: boolean): RegExpExecArray | null {
  const whole = isGone ? text : text.slice(0, text.lastIndexOf('\n') + 1)
  for (const line of whole.split('\n')) {
    const found = new RegExp(pattern.source, pattern.flags.replace(/[gy]/g, '')).exec(line)
    if (found !== null) return found
  }
  return null
}
