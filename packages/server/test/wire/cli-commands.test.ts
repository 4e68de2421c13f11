/** The commands as an operator types them: the built program, against a real server and a real database. */
import { createHash, randomUUID } from 'node:crypto'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  endAll,
  finishes,
  latch,
  operation,
  runProgram,
  type ServerProcess,
  startServer,
  startTarget,
  submit,
  type Target,
  until,
} from '../server-process.js'

const settledNames = ['ops list', 'ops show', 'ops retry', 'ops cancel'] as const
const letterNames = ['dead-letters list', 'dead-letters show', 'dead-letters redrive', 'dead-letters purge'] as const

describe('commands that speak to a server', () => {
  let database: TestDatabase
  let server: ServerProcess
  let target: Target
  let status: number
  let gate = latch()

  beforeAll(async () => {
    database = await freshDatabase({ empty: true })
    target = await startTarget(async ({ path }, response) => {
      if (path === '/wait') await gate.opened
      response.writeHead(path === '/moody' ? status : 200, { 'content-type': 'application/json' }).end('{"ok":true}')
    })
    server = await startServer({ DATABASE_URL: database.url, SPILLWAY_FORWARD_ALLOW: target.origin })
  })
  afterAll(async () => {
    gate.open()
    await server?.stop()
    await target?.close()
    await endAll()
    await database?.drop()
  })
  beforeEach(() => {
    status = 400
    gate = latch()
  })
  afterEach(() => gate.open())

  const cli = (...args: string[]) => runProgram({ SPILLWAY_URL: server.origin }, { args })
  const rows = (table: string): string[] => table.trimEnd().split('\n').slice(1)
  /** A lane whose first operation waits at the gate, and one behind it. */
  const blockedLane = async (queue: string): Promise<{ running: string; pending: string }> => {
    const calls = target.calls.length
    const running = (await submit(server, `${target.origin}/wait`, { queue }, { prefer: 'respond-async' })).body
    await until('it runs', () => target.calls.length > calls)
    const pending = (await submit(server, `${target.origin}/`, { queue })).body
    return { running: running.operationId, pending: pending.operationId }
  }
  const deadLetter = async (queue: string, partition = 'p'): Promise<string> => {
    const { operationId } = (await submit(server, `${target.origin}/moody`, { queue, partition })).body
    expect((await finishes(server, operationId)).status).toBe('failed')
    return operationId
  }

  it('lists, filters and pages', async () => {
    const queue = randomUUID()
    const ids: string[] = []
    for (const partition of ['a', 'b', 'c']) {
      ids.unshift((await submit(server, `${target.origin}/`, { queue, partition })).body.operationId)
    }
    const all = await cli('ops', 'list', '--queue', queue)
    expect(all).toMatchObject({ code: 0, stderr: '' })
    expect(all.stdout).toMatch(/^id +type +queue +partition +status/i)
    expect(rows(all.stdout).map((row) => row.split(/\s+/)[0])).toEqual(ids)

    const first = await cli('ops', 'list', '--queue', queue, '--limit', '2')
    expect(rows(first.stdout)).toHaveLength(2)
    const cursor = /--cursor (\S+)/.exec(first.stderr)?.[1] ?? ''
    const second = await cli('ops', 'list', '--queue', queue, '--cursor', cursor, '--json')
    expect(JSON.parse(second.stdout)).toMatchObject({ items: [{ id: ids[2], partition: 'a' }], next_cursor: null })

    expect(rows((await cli('ops', 'list', '--queue', queue, '--partition', 'b')).stdout)).toHaveLength(1)
    expect(rows((await cli('ops', 'list', '--queue', queue, '--status', 'failed')).stdout)).toHaveLength(0)
  })

  it('refuses a wrong filter in the words of the server', async () => {
    const wrong = await cli('ops', 'list', '--status', 'lost')
    expect(wrong).toMatchObject({ code: 1, stdout: '' })
    expect(wrong.stderr).toContain('invalid_request')
    expect(wrong.stderr).toContain('/status')
  })

  it('shows one, and waits for it', async () => {
    const { running } = await blockedLane(randomUUID())
    expect((await cli('ops', 'show', running)).stdout).toMatch(/status +processing/)
    const waiting = cli('ops', 'show', running, '--wait', '20', '--json')
    gate.open()
    const shown = await waiting
    expect(shown.code).toBe(0)
    expect(JSON.parse(shown.stdout)).toMatchObject({ id: running, status: 'completed', result: { status: 200 } })
    expect(await cli('ops', 'show', randomUUID())).toMatchObject({ code: 1, stdout: '' })
  })

  it('cancels a pending operation, and reports what cannot be cancelled', async () => {
    const done = (await submit(server, `${target.origin}/`)).body.operationId
    const { running, pending } = await blockedLane(randomUUID())
    const cancelled = await cli('ops', 'cancel', done, pending)
    expect(cancelled).toMatchObject({ code: 1, stdout: `${pending} cancelled\n` })
    expect(cancelled.stderr).toMatch(new RegExp(`^${done} .*operation_finished`))
    expect((await operation(server, pending)).status).toBe('cancelled')
    gate.open()
    expect((await finishes(server, running)).status).toBe('completed')
  })

  it('retries what failed, and nothing else', async () => {
    const failed = await deadLetter(randomUUID())
    const done = (await submit(server, `${target.origin}/`)).body.operationId
    status = 200
    const retried = await cli('ops', 'retry', failed, done)
    expect(retried).toMatchObject({ code: 1, stdout: `${failed} queued again\n` })
    expect(retried.stderr).toContain('operation_not_failed')
    expect((await finishes(server, failed)).status).toBe('completed')
  })

  it('shows a complete dead letter that the list cuts', async () => {
    const [queue, body] = [randomUUID(), 'x'.repeat(10_000)]
    const { operationId } = (await submit(server, `${target.origin}/moody`, { queue, payload: { body } })).body
    const [listed] = JSON.parse((await cli('dead-letters', 'list', '--queue', queue, '--json')).stdout).items
    expect(listed).toMatchObject({ id: operationId, payload: null, truncated: true })
    expect(rows((await cli('dead-letters', 'list', '--queue', queue)).stdout)).toHaveLength(1)
    expect((await cli('dead-letters', 'show', operationId)).stdout).toContain(body)
    const shown = JSON.parse((await cli('dead-letters', 'show', operationId, '--json')).stdout)
    expect(shown).toMatchObject({ id: operationId, payload: { payload: { body } } })
    expect(await cli('dead-letters', 'show', randomUUID())).toMatchObject({ code: 1, stdout: '' })
    await cli('dead-letters', 'purge', '--queue', queue, '--yes')
  })

  it('lists dead letters and redrives them, in order', async () => {
    const queue = randomUUID()
    const ids = [await deadLetter(queue), await deadLetter(queue), await deadLetter(queue, 'other')]
    const listed = await cli('dead-letters', 'list', '--queue', queue)
    expect(rows(listed.stdout).map((row) => row.split(/\s+/)[0])).toEqual([...ids].reverse())
    expect(listed.stdout).toContain('the target answered 400')

    status = 200
    const from = target.calls.length
    expect(await cli('dead-letters', 'redrive', '--queue', queue, '--partition', 'p')).toMatchObject({
      code: 0,
      stdout: 'moved 2, skipped 0\n',
    })
    for (const id of ids.slice(0, 2)) expect((await finishes(server, id)).status).toBe('completed')
    expect(target.calls.slice(from).map((call) => call.headers['idempotency-key'])).toEqual(ids.slice(0, 2))

    const rest = await cli('dead-letters', 'redrive', ids[2] ?? '', randomUUID(), '--json')
    expect(JSON.parse(rest.stdout)).toEqual({ moved: 1, skipped: 1 })
    await finishes(server, ids[2] ?? '')
    expect(rows((await cli('dead-letters', 'list', '--queue', queue)).stdout)).toHaveLength(0)
  })

  it('redrives each once, though the moved ones fail again at once', async () => {
    const queue = randomUUID()
    await Promise.all(Array.from({ length: 250 }, (_, i) => deadLetter(queue, `p${i}`)))
    const from = target.calls.length
    expect(await cli('dead-letters', 'redrive', '--queue', queue)).toMatchObject({ stdout: 'moved 250, skipped 0\n' })
    await until('each was tried again', () => target.calls.length >= from + 250)
    const tried = target.calls.slice(from).map((call) => call.headers['idempotency-key'])
    expect(new Set(tried).size).toBe(250)
    expect(tried).toHaveLength(250)
  })

  it('redrives more than one call handles', async () => {
    const queue = randomUUID()
    const lanes = Array.from({ length: 250 }, (_, i) => `p${i}`)
    await Promise.all(lanes.map((partition) => deadLetter(queue, partition)))
    status = 200
    expect(await cli('dead-letters', 'redrive', '--queue', queue)).toMatchObject({ stdout: 'moved 250, skipped 0\n' })
    await until('all are through', async () => {
      const unfinished = await cli('ops', 'list', '--queue', queue, '--status', 'pending')
      return rows(unfinished.stdout).length === 0
    })
    expect(rows((await cli('dead-letters', 'list', '--queue', queue)).stdout)).toHaveLength(0)
  })

  it('asks before it purges, and purges only the given ones', async () => {
    const queue = randomUUID()
    const kept = await deadLetter(randomUUID())
    await deadLetter(queue)
    await deadLetter(queue, 'other')
    expect(await cli('dead-letters', 'purge', '--yes')).toMatchObject({ code: 2, stdout: '' })
    const asked = await cli('dead-letters', 'purge', '--queue', queue)
    expect(asked).toMatchObject({ code: 2, stdout: '' })
    expect(asked.stderr).toContain('--yes')
    expect(rows((await cli('dead-letters', 'list', '--queue', queue)).stdout)).toHaveLength(2)
    expect(await cli('dead-letters', 'purge', '--queue', queue, '--yes')).toMatchObject({
      code: 0,
      stdout: 'purged 2\n',
    })
    expect((await operation(server, kept)).status).toBe('failed')
    expect(await cli('dead-letters', 'purge', '--all', '--yes', '--json')).toMatchObject({ code: 0 })
    expect(rows((await cli('dead-letters', 'list')).stdout)).toHaveLength(0)
  })

  it('redrive needs either ids or --all', async () => {
    expect(await cli('dead-letters', 'redrive')).toMatchObject({ code: 2, stdout: '' })
    expect(await cli('dead-letters', 'redrive', randomUUID(), '--all')).toMatchObject({ code: 2, stdout: '' })
  })

  it('doctor knows the server that listens', async () => {
    const healthy = await runProgram(
      { DATABASE_URL: database.url, SPILLWAY_PORT: String(server.port) },
      { args: ['doctor'] },
    )
    expect(healthy.stdout).toContain(`answers on 127.0.0.1:${server.port}`)
    expect(healthy.stdout).toMatch(/✓ schema: spillway is at version (\d+) of \1/)
    expect(healthy).toMatchObject({ code: 0 })
  })
})

describe('roles', () => {
  let database: TestDatabase
  let dir: string
  const keyed = (key: string, identity: string, roles: string[]) => ({
    [`sha256:${createHash('sha256').update(key).digest('hex')}`]: { identity, roles },
  })

  beforeAll(async () => {
    database = await freshDatabase({ empty: true })
    dir = await mkdtemp(join(tmpdir(), 'spillway-cli-'))
  })
  afterAll(async () => {
    await endAll()
    await database?.drop()
    await rm(dir, { recursive: true, force: true })
  })

  it('is decided by the key', async () => {
    const file = join(dir, 'keys.json')
    await writeFile(
      file,
      JSON.stringify({ ...keyed('op-key', 'ann', ['operate', 'submit']), ...keyed('low', 'bob', ['submit']) }),
    )
    const server = await startServer({ DATABASE_URL: database.url, SPILLWAY_API_KEYS: file })
    const cli = (env: Record<string, string>, ...args: string[]) =>
      runProgram({ SPILLWAY_URL: server.origin, ...env }, { args })
    const nobody = await cli({}, 'ops', 'list')
    expect(nobody).toMatchObject({ code: 1, stdout: '' })
    expect(nobody.stderr).toContain('SPILLWAY_API_KEY')
    expect((await cli({ SPILLWAY_API_KEY: 'op-key' }, 'ops', 'list')).code).toBe(0)
    expect((await cli({}, 'ops', 'list', '--key', 'op-key')).code).toBe(0)
    const low = await cli({ SPILLWAY_API_KEY: 'low' }, 'dead-letters', 'purge', '--all', '--yes')
    expect(low).toMatchObject({ code: 1, stdout: '' })
    expect(low.stderr).toContain('forbidden')
    await server.stop()
  })
})

describe('commands that need no server', () => {
  it('says that no server answers', async () => {
    const lonely = await runProgram({}, { args: ['ops', 'list', '--url', 'http://127.0.0.1:9'] })
    expect(lonely).toMatchObject({ code: 1, stdout: '' })
    expect(lonely.stderr).toContain('is the server running?')
    expect(lonely.stderr).not.toContain('    at ')
  })

  it('lists every setting with its value and source', async () => {
    const env = { SPILLWAY_CONCURRENCY: '7', DATABASE_URL: 'postgres://me:hunter2@localhost/app' }
    const shown = await runProgram(env, { args: ['config', '--json'] })
    expect(shown.code).toBe(0)
    expect(JSON.parse(shown.stdout)).toContainEqual(
      expect.objectContaining({ name: 'SPILLWAY_CONCURRENCY', value: '7', source: 'environment' }),
    )
    const table = await runProgram(env, { args: ['config'] })
    expect(table.stdout).toMatch(/SPILLWAY_PORT +7745 +default/)
    expect(table.stdout + shown.stdout).not.toContain('hunter2')
  })

  it('stops at an unknown or wrong setting, naming it', async () => {
    const wrong = await runProgram({ SPILLWAY_CONCURENCY: '7', SPILLWAY_PORT: 'x' }, { args: ['serve'] })
    expect(wrong).toMatchObject({ code: 2, stdout: '' })
    expect(wrong.stderr).toContain('SPILLWAY_CONCURENCY')
    expect(wrong.stderr).toContain('SPILLWAY_PORT')
  })

  it('migrates, once', async () => {
    const database = await freshDatabase({ empty: true })
    try {
      const env = { DATABASE_URL: database.url, SPILLWAY_DB_SCHEMA: 'mine' }
      const before = await runProgram({ ...env, SPILLWAY_PORT: '0' }, { args: ['doctor'] })
      expect(before.code).toBe(0)
      expect(before.stdout).toContain('! schema: mine is not made yet')
      const first = await runProgram(env, { args: ['migrate'] })
      expect(first.code).toBe(0)
      expect(first.stdout).toMatch(/^schema mine: version 0 → \d+\n$/)
      expect((await runProgram(env, { args: ['migrate'] })).stdout).toMatch(/^schema mine is at version \d+\n$/)
    } finally {
      await database.drop()
    }
  })

  it('migrates and examines an embedded store, and leaves it stopped', async () => {
    const dir = await mkdtemp(join(tmpdir(), 'spillway-cli-'))
    try {
      const env = { SPILLWAY_DATA_DIR: join(dir, 'data'), SPILLWAY_PORT: '0' }
      expect((await runProgram(env, { args: ['doctor'] })).stdout).toContain(`${env.SPILLWAY_DATA_DIR} will be made`)
      for (const expected of [/version 0 → \d+/, /is at version \d+/]) {
        expect((await runProgram(env, { args: ['migrate'] })).stdout).toMatch(expected)
      }
    } finally {
      await rm(dir, { recursive: true, force: true })
    }
  })

  it('reports the problem with a database, without its password', async () => {
    const args = ['doctor', '--json']
    const env = { DATABASE_URL: 'postgres://me:hunter2@127.0.0.1:9/app', SPILLWAY_PORT: '0' }
    const sick = await runProgram(env, { args })
    expect(sick.code).toBe(1)
    expect(sick.stdout).not.toContain('hunter2')
    const { ok, findings } = JSON.parse(sick.stdout)
    expect(ok).toBe(false)
    expect(findings).toContainEqual(
      expect.objectContaining({ name: 'database', state: 'wrong', fix: expect.stringContaining('DATABASE_URL') }),
    )
  })

  it.each([
    ...['', 'serve', 'worker', 'migrate', 'config', 'doctor', 'ops', 'dead-letters'],
    ...settledNames,
    ...letterNames,
  ])('helps with "%s"', async (command) => {
    const words = command === '' ? [] : command.split(' ')
    const helped = await runProgram({}, { args: [...words, '--help'] })
    expect(helped).toMatchObject({ code: 0, stderr: '' })
    expect(helped.stdout).toContain(`spillway ${command}`.trimEnd())
    expect(helped.stdout.split('\n').length).toBeGreaterThan(4)
  })

  it.each([['nonsense'], ['ops'], ['ops', 'nonsense'], ['serve', '--nonsense'], ['ops', 'show']])(
    'does nothing for %j %j and says so',
    async (...args) => {
      const wrong = await runProgram({}, { args })
      expect(wrong).toMatchObject({ code: 2, stdout: '' })
      expect(wrong.stderr).toMatch(/^(spillway:|Usage: spillway) .+\n/)
    },
  )
})
