/** `spillway/testing` without a database: the embedded PostgreSQL that all tests of a machine share. Uses the build. */
import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import { existsSync } from 'node:fs'
import { chmod, mkdtemp, readdir, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'
import pg from 'pg'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { eventually } from '../pipeline-fixture.js'

const dist = fileURLToPath(new URL('../../dist/testing/', import.meta.url))
/** A test process: makes an intake, runs an operation, says so, and ends when its input ends. */
const program = `
  const { createTestIntake } = await import(${JSON.stringify(`${dist}index.js`)})
  const began = performance.now()
  const t = await createTestIntake({ dataDir: process.argv[1] })
  const ms = Math.round(performance.now() - began)
  const op = t.intake.define('op', { run: () => 7 })
  const answer = await t.intake.submit(op, null)
  console.log(JSON.stringify({ url: t.url, schema: t.schema, result: answer.result, ms }))
  process.stdin.resume().on('end', async () => { await t.close(); process.exit(0) })
`

let parent: string
let dataDir: string
const children: ChildProcess[] = []
beforeEach(async () => {
  parent = await mkdtemp(join(tmpdir(), 'spillway-testing-'))
  // As root, the server's account has to pass it.
  await chmod(parent, 0o755)
  dataDir = join(parent, 'data')
})
afterEach(async () => {
  for (const child of children.splice(0)) child.kill('SIGKILL')
  const pid = await holderPid()
  if (pid !== null) {
    kill(pid, 'SIGTERM')
    await eventually(() => !isAlive(pid) || undefined, 'the holder to end', 60_000)
  }
  await rm(parent, { recursive: true, force: true, maxRetries: 5, retryDelay: 200 })
})

const isAlive = (pid: number): boolean => kill(pid, 0)
function kill(pid: number, signal: NodeJS.Signals | 0): boolean {
  try {
    return process.kill(pid, signal)
  } catch (error) {
    if ((error as { code?: unknown }).code !== 'ESRCH') throw error
    return false
  }
}

/** From the folder's lock. */
async function holderPid(): Promise<number | null> {
  if (!existsSync(dataDir)) return null
  const names = (await readdir(dataDir)).filter((name) => /^owner-\d+$/.test(name))
  const owners = await Promise.all(names.map(async (name) => JSON.parse(await readFile(join(dataDir, name), 'utf8'))))
  return owners.find((owner) => owner.released !== true && isAlive(owner.pid))?.pid ?? null
}

interface Made {
  url: string
  schema: string
  result: number
  ms: number
}

async function testProcess(): Promise<{ child: ChildProcess; made: Made }> {
  const { SPILLWAY_TEST_DATABASE_URL: _, ...env } = process.env
  const child = spawn(process.execPath, ['--input-type=module', '-e', program, dataDir], {
    env,
    stdio: ['pipe', 'pipe', 'inherit'],
  })
  children.push(child)
  const lines = createInterface({ input: child.stdout as NonNullable<typeof child.stdout> })
  const ended = once(child, 'exit').then(([code]) => Promise.reject(new Error(`it ended with ${code}`)))
  ended.catch(() => undefined)
  const [line] = await Promise.race([once(lines, 'line'), ended])
  return { child, made: JSON.parse(String(line)) }
}

async function close(child: ChildProcess): Promise<void> {
  child.stdin?.end()
  if (child.exitCode === null) await once(child, 'exit')
}

async function schemas(url: string): Promise<string[]> {
  const client = new pg.Client({ connectionString: url })
  await client.connect()
  try {
    const { rows } = await client.query(
      "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'spillway\\_test%' ORDER BY 1",
    )
    return rows.map(({ nspname }) => nspname)
  } finally {
    await client.end()
  }
}

describe('the shared embedded server', () => {
  it('is one for all processes that start at once, outlives them, and what a killed one leaves is dropped', async () => {
    const first = await Promise.all([1, 2, 3, 4].map(testProcess))
    const [one] = first
    if (one === undefined) throw new Error('no process')
    expect(first.map(({ made }) => made.result)).toEqual([7, 7, 7, 7])
    expect(new Set(first.map(({ made }) => made.url)).size).toBe(1)
    expect(await schemas(one.made.url)).toEqual(first.map(({ made }) => made.schema).sort())
    const killed = first.pop()
    killed?.child.kill('SIGKILL')
    await Promise.all(first.map(({ child }) => close(child)))
    const holder = await holderPid()
    expect(holder).not.toBeNull()

    const warm = await testProcess()
    console.log(`warm start ${warm.made.ms} ms`)
    expect(warm.made.url).toBe(one.made.url)
    expect(await holderPid()).toBe(holder)
    await eventually(
      async () => JSON.stringify(await schemas(one.made.url)) === JSON.stringify([warm.made.schema]) || undefined,
      'the schema of the killed one to be dropped',
    )
    await close(warm.child)
  }, 180_000)

  it('is adopted when its holder was killed', async () => {
    const first = await testProcess()
    const holder = await holderPid()
    if (holder === null) throw new Error('no holder')
    kill(holder, 'SIGKILL')
    await eventually(() => !isAlive(holder) || undefined, 'the holder to die')
    const second = await testProcess()
    expect(second.made).toMatchObject({ url: first.made.url, result: 7 })
    const next = await holderPid()
    expect(next).not.toBeNull()
    expect(next).not.toBe(holder)
    await Promise.all([first, second].map(({ child }) => close(child)))
  }, 180_000)

  it('ends when nobody has used it for a while, and leaves no process', async () => {
    const holder = spawn(process.execPath, [join(dist, 'hold-server.js'), dataDir, '400'], { stdio: 'inherit' })
    children.push(holder)
    const exited = once(holder, 'exit')
    const used = await Promise.race([testProcess(), exited.then(() => Promise.reject(new Error('it ended in use')))])
    const postmaster = Number((await readFile(join(dataDir, 'postgres', 'postmaster.pid'), 'utf8')).split('\n')[0])
    await close(used.child)
    expect(await exited).toEqual([0, null])
    expect(isAlive(postmaster)).toBe(false)
    expect(existsSync(join(dataDir, 'address'))).toBe(false)
    // The next one starts it again.
    const next = await testProcess()
    expect(next.made.result).toBe(7)
    await close(next.child)
  }, 180_000)
})
