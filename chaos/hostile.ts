/**
 * `npm run chaos -- --hostile`: callers who mean harm, against one real server on a PostgreSQL of the run. Each attack
 * (hostile-attacks.ts) gets a fresh server process, so that memory is compared with what an idle server needs. While an attack
 * lasts, a process of its own (hostile-watch.ts) asks for health and plays an honest caller, so that the attacker's own load on the
 * event loop is not taken for the server's.
 *
 * Found is: a server that ended, that grew by more than `growthMaxBytes`, whose health took longer than `healthMaxMs`, that
 * kept honest callers waiting or refused them, or that answered the attackers otherwise than the attack says.
 */
import { type ChildProcess, fork, spawn } from 'node:child_process'
import { once } from 'node:events'
import { createWriteStream } from 'node:fs'
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { startCluster } from './cluster.js'
import { type Attack, attacks, prepare, type Size } from './hostile-attacks.js'
import type { WatchReport } from './hostile-watch.js'
import { machine } from './report.js'

export interface HostileRunOptions {
  quick: boolean
  reportFile: string | null
  keep: boolean
  say(line: string): void
  signal: AbortSignal
}

interface Played {
  attack: string
  figures: Record<string, number>
  findings: string[]
}

const growthMaxBytes = 300 * 1_000_000
const healthMaxMs = 100
/** With fewer samples, as in a short run, times and refusals are of the attack's first burst alone: shown, and not judged. */
const samplesMin = 250
/** Of what an honest caller asks while the attack lasts. */
const honestRefusedShareMax = 0.05
const lookMs = 100
const sayEveryMs = 2_000
const startMaxMs = 60_000
const full: Size = {
  sockets: 200,
  letters: 200,
  megabytes: 120,
  pipelined: 20_000,
  holdMs: 10_000,
  unreadHoldMs: 40_000,
}
const quick: Size = { sockets: 60, letters: 30, megabytes: 40, pipelined: 2_000, holdMs: 1_000, unreadHoldMs: 1_000 }
const serverProgram = join(import.meta.dirname, '../packages/server/dist/cli/main.js')
const watchProgram = join(import.meta.dirname, 'hostile-watch.ts')

/** Ends with the findings; null when it was interrupted. */
export async function runHostile(options: HostileRunOptions): Promise<string[] | null> {
  const { say, signal, keep } = options
  const size = options.quick ? quick : full
  const startedAt = new Date()
  const folder = await mkdtemp(join(tmpdir(), 'spillway-chaos-hostile-'))
  const log = createWriteStream(join(folder, 'processes.log'))
  const note = (line: string): void => void log.write(`${line}\n`)
  const played: Played[] = []
  try {
    say('starting PostgreSQL')
    const cluster = await startCluster(join(folder, 'data'), note)
    try {
      say(`storing ${size.letters} dead letters, ${size.megabytes} MB of messages and traces`)
      await withServer(cluster.url, note, ({ origin }) => prepare(origin, size))
      for (const attack of attacks) {
        if (!signal.aborted) played.push(await play(attack, cluster.url, size, { note, say }))
      }
    } finally {
      await cluster.stop()
    }
  } finally {
    await new Promise((resolve) => log.end(resolve))
    await rm(join(folder, 'data'), { recursive: true, force: true })
  }
  if (signal.aborted) return null
  const findings = played.flatMap((one) => one.findings.map((finding) => `${one.attack}: ${finding}`))
  const file = options.reportFile ?? join(tmpdir(), 'spillway-chaos-hostile.json')
  const seconds = Math.round((Date.now() - startedAt.getTime()) / 1_000)
  const report = { startedAt: startedAt.toISOString(), seconds, size, machine: machine(), attacks: played }
  await writeFile(file, `${JSON.stringify(report, null, 2)}\n`)
  const isKept = keep || findings.length > 0
  if (!isKept) await rm(folder, { recursive: true, force: true })
  const verdict = findings.length === 0 ? 'nothing was found' : `${findings.length} violations`
  say(`${verdict}; report: ${file}${isKept ? `; logs: ${folder}` : ''}`)
  return findings
}

interface Voice {
  note(line: string): void
  say(line: string): void
}

async function play(attack: Attack, databaseUrl: string, size: Size, { note, say }: Voice): Promise<Played> {
  const findings: string[] = []
  const figures = await withServer(databaseUrl, note, async (server) => {
    const before = await residentBytes(server.pid)
    const watch = await startWatch(server.origin)
    say(`${attack.name}: ${attack.says(size)}`)
    const memory = watchMemory(server.pid, before, say)
    const seen = await attack.play(server.origin, size)
    const peak = await memory.stop()
    const watched = await watch.stop()
    findings.push(...seen.findings, ...judge(server.exit(), peak - before, watched))
    return {
      ...seen.figures,
      before_mb: megabytes(before),
      growth_mb: megabytes(peak - before),
      health_asked: watched.health.asked,
      health_p50_ms: watched.health.p50Ms,
      health_p99_ms: watched.health.p99Ms,
      honest_calls: watched.honest.calls,
      honest_refused: watched.honest.refused,
      honest_failed: watched.honest.failed,
    }
  })
  say(`  ${JSON.stringify(figures)}`)
  for (const finding of findings) say(`  FOUND ${finding}`)
  return { attack: attack.name, figures, findings }
}

function judge(exit: string | null, growth: number, { health, honest }: WatchReport): string[] {
  const findings: string[] = []
  if (exit !== null) findings.push(`the server ended: ${exit}`)
  if (growth > growthMaxBytes) findings.push(`memory grew by ${megabytes(growth)} MB`)
  if (health.asked === 0 || health.failed > 0) findings.push(`health failed ${health.failed} of ${health.asked} times`)
  if (health.asked >= samplesMin && health.p99Ms > healthMaxMs) {
    findings.push(`health took ${health.p99Ms} ms (p99 of ${health.asked})`)
  }
  if (honest.calls === 0 || honest.failed > 0) findings.push(`${honest.failed} of ${honest.calls} honest calls failed`)
  if (honest.calls >= samplesMin && honest.refused > honest.calls * honestRefusedShareMax) {
    findings.push(`${honest.refused} of ${honest.calls} honest calls were refused`)
  }
  return findings
}

interface HostileServer {
  origin: string
  pid: number
  /** Why it ended; null: it runs. */
  exit(): string | null
}

async function withServer<T>(
  databaseUrl: string,
  note: (line: string) => void,
  use: (server: HostileServer) => Promise<T>,
): Promise<T> {
  const { PATH = '', HOME = '/' } = process.env
  const child = spawn(process.execPath, [serverProgram, 'serve'], {
    env: { PATH, HOME, DATABASE_URL: databaseUrl, SPILLWAY_PORT: '0' },
    stdio: ['ignore', 'pipe', 'pipe'],
  })
  let exit: string | null = null
  const ended = once(child, 'close').then(([code, signal]) => {
    exit = `ended with ${code ?? signal}`
  })
  try {
    const origin = await addressOf(child, note)
    await untilReady(origin)
    return await use({ origin, pid: child.pid ?? 0, exit: () => exit })
  } finally {
    // What it holds for the attackers is not waited for: the next attack gets a new one.
    child.kill('SIGKILL')
    await ended
  }
}

function addressOf(child: ChildProcess, note: (line: string) => void): Promise<string> {
  return new Promise((resolve, reject) => {
    let written = ''
    const timer = setTimeout(() => reject(new Error(`the server did not start in time:\n${written}`)), startMaxMs)
    child.once('close', (code) => reject(new Error(`the server ended with ${code}:\n${written}`)))
    for (const stream of [child.stdout, child.stderr]) {
      stream?.setEncoding('utf8').on('data', (chunk: string) => {
        note(chunk)
        written = (written + chunk).slice(-8_000)
        const origin = /listens on (http:\/\/[^:\s]+:\d+)/.exec(written)?.[1]
        if (origin === undefined) return
        clearTimeout(timer)
        resolve(origin)
      })
    }
  })
}

async function untilReady(origin: string): Promise<void> {
  const deadline = Date.now() + startMaxMs
  for (;;) {
    const answer = await fetch(`${origin}/health/ready`).catch(() => null)
    await answer?.arrayBuffer()
    if (answer?.status === 200) return
    if (Date.now() > deadline) throw new Error('the server did not become ready in time')
    await delay(lookMs)
  }
}

async function startWatch(origin: string): Promise<{ stop(): Promise<WatchReport> }> {
  const child = fork(watchProgram, [origin], {
    execArgv: ['--import', 'tsx'],
    stdio: ['ignore', 'inherit', 'inherit', 'ipc'],
  })
  await once(child, 'message')
  return {
    async stop() {
      const report = once(child, 'message')
      child.send('stop')
      const [seen] = (await report) as [WatchReport]
      await once(child, 'close')
      return seen
    },
  }
}

/** The largest resident size meanwhile. */
function watchMemory(pid: number, before: number, say: (line: string) => void): { stop(): Promise<number> } {
  let peak = before
  let over = false
  let saidAt = Date.now()
  const looking = (async () => {
    while (!over) {
      // Gone: the verdict says so.
      const now = await residentBytes(pid).catch(() => 0)
      peak = Math.max(peak, now)
      if (Date.now() - saidAt >= sayEveryMs) {
        saidAt = Date.now()
        say(`  memory ${megabytes(now)} MB (${now >= before ? '+' : ''}${megabytes(now - before)})`)
      }
      await delay(lookMs)
    }
  })()
  return {
    async stop() {
      over = true
      await looking
      return peak
    },
  }
}

async function residentBytes(pid: number): Promise<number> {
  const status = await readFile(`/proc/${pid}/status`, 'utf8')
  return Number(/^VmRSS:\s+(\d+) kB/m.exec(status)?.[1] ?? 0) * 1_024
}

const megabytes = (bytes: number): number => Math.round(bytes / 1_000_000)
