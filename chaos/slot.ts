/**
 * A place for a process that is ended and started again, with its own proxy to PostgreSQL.
 *
 *   down ──start()──► up ──kill() │ stop()──► down
 *                     up ──pause()──► paused ──go on──► up
 *
 * Faults of one slot are played one after the other (`exclusively`); of different slots at the same time.
 */
import { type ChildProcess, spawn } from 'node:child_process'
import { createWriteStream } from 'node:fs'
import { join } from 'node:path'
import type { FaultProxy } from './fault-proxy.js'
import type { Life } from './records.js'

export interface Program {
  command: readonly string[]
  env: Readonly<Record<string, string>>
  /** Its port, from what it writes once it works; null: not yet. */
  readyPort(written: string): number | null
  /** Its end is tied to ours by a channel. */
  channel: boolean
}

export interface SlotOptions {
  name: string
  /** Takes requests for these paths' routes; empty for workers. */
  routes: ReadonlySet<string>
  program: Program
  proxy: FaultProxy
  logDir: string
  lives: Life[]
}

const startMaxMs = 60_000
const tailCharacters = 2_000

export class Slot {
  readonly name: string
  readonly routes: ReadonlySet<string>
  readonly proxy: FaultProxy
  readonly #o: SlotOptions
  #child: ChildProcess | null = null
  #life: Life | null = null
  #ended: Promise<number | null> = Promise.resolve(null)
  #asked = false
  #queue: Promise<unknown> = Promise.resolve()
  origin: string | null = null

  constructor(options: SlotOptions) {
    this.#o = options
    this.name = options.name
    this.routes = options.routes
    this.proxy = options.proxy
  }

  get pid(): number {
    return this.#child?.pid ?? 0
  }

  get isUp(): boolean {
    return this.#child !== null
  }

  /** One fault at a time, in the order in which they were asked for. */
  exclusively<T>(play: () => Promise<T>): Promise<T> {
    const turn = this.#queue.then(play, play)
    // The next one must have its turn whatever became of this one; its own caller hears of the fault.
    this.#queue = turn.catch(() => undefined)
    return turn
  }

  /** Nothing, when it is up. */
  async start(): Promise<void> {
    if (this.isUp) return
    const { program, logDir, name } = this.#o
    const [command = '', ...args] = program.command
    const { PATH = '', HOME = '/' } = process.env
    const child = spawn(command, args, {
      env: { PATH, HOME, ...program.env },
      stdio: program.channel ? ['ignore', 'pipe', 'pipe', 'ipc'] : ['ignore', 'pipe', 'pipe'],
    })
    this.#asked = false
    const log = createWriteStream(join(logDir, `${name}.log`), { flags: 'a' })
    let written = ''
    const port = await new Promise<number>((resolve, reject) => {
      const timer = setTimeout(() => fail('did not start in time'), startMaxMs)
      const fail = (why: string): void => {
        clearTimeout(timer)
        child.kill('SIGKILL')
        reject(new Error(`${name} ${why}:\n${written.slice(-tailCharacters)}`))
      }
      this.#ended = new Promise((end) => {
        child.once('close', (code, signal) => {
          log.end()
          fail(`ended with ${code ?? signal}`)
          this.#over(child, code ?? signal, written)
          end(code)
        })
      })
      child.once('error', (fault) => fail(fault.message))
      for (const stream of [child.stdout, child.stderr]) {
        stream?.setEncoding('utf8').on('data', (chunk: string) => {
          log.write(chunk)
          written = (written + chunk).slice(-tailCharacters * 4)
          const found = program.readyPort(written)
          if (found === null) return
          clearTimeout(timer)
          resolve(found)
        })
      }
    })
    this.#child = child
    this.origin = port === 0 ? null : `http://127.0.0.1:${port}`
    this.#life = {
      slot: name,
      pid: child.pid ?? 0,
      gateway: port !== 0,
      upAt: Date.now(),
      endedAt: null,
      unasked: null,
    }
    this.#o.lives.push(this.#life)
  }

  #over(child: ChildProcess, how: number | string | null, written: string): void {
    if (this.#child !== child || this.#life === null) return
    this.#life.endedAt = Date.now()
    this.#child = null
    this.origin = null
    if (this.#asked) return
    this.#life.unasked = `ended with ${how}: ${written.slice(-tailCharacters)}`
    // A supervisor would do the same. If it cannot be started, the next fault or the end of the run says so.
    this.exclusively(() => this.start()).catch(() => undefined)
  }

  signal(signal: NodeJS.Signals): void {
    this.#child?.kill(signal)
  }

  /** SIGKILL; resolves when it is gone. */
  async kill(): Promise<void> {
    this.#asked = true
    this.#child?.kill('SIGKILL')
    await this.#ended
  }

  /** SIGTERM; its exit code, or null when it had to be killed after `withinMs`. */
  async stop(withinMs: number): Promise<{ code: number | null; afterMs: number }> {
    this.#asked = true
    const began = Date.now()
    const timer = setTimeout(() => this.#child?.kill('SIGKILL'), withinMs)
    this.#child?.kill('SIGTERM')
    const code = await this.#ended
    clearTimeout(timer)
    return { code, afterMs: Date.now() - began }
  }
}
