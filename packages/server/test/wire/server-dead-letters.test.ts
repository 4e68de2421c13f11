/** Operations that used up their attempts: kept whole, redriven in order, purged by filter. */
import { afterAll, afterEach, beforeAll, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  type Body,
  call,
  endAll,
  finishes,
  get,
  operation,
  post,
  type ServerProcess,
  startServer,
  startTarget,
  submit,
  type Target,
  until,
} from '../server-process.js'

let database: TestDatabase
let server: ServerProcess
let target: Target
let broken = true

beforeAll(async () => {
  database = await freshDatabase()
  target = await startTarget(({ path }, response) => {
    response.writeHead(path.startsWith('/broken') && broken ? 400 : 200).end()
  })
  server = await startServer({ DATABASE_URL: database.url, SPILLWAY_FORWARD_ALLOW: target.origin })
})

afterEach(() => {
  broken = true
})

afterAll(async () => {
  await endAll()
  await target.close()
  await database.drop()
})

const letters = async (queue: string): Promise<Body[]> =>
  (await get(server, `/api/v1/dead-letters?queue=${queue}`)).body.items
const die = async (queue: string, count: number): Promise<string[]> => {
  const ids = []
  for (let n = 0; n < count; n++) {
    const { body } = await submit(server, `${target.origin}/broken/${queue}?${n}`, {
      queue,
      payload: { body: { n } },
    })
    expect(body.status).toBe('failed')
    ids.push(body.operationId)
  }
  return ids
}
const pathsOf = (queue: string) => target.calls.filter((c) => c.path.startsWith(`/broken/${queue}`)).map((c) => c.path)

it('are kept complete', async () => {
  const [id] = await die('whole', 1)
  const [letter] = await letters('whole')
  expect(letter).toMatchObject({ id, status: 'failed', attempt: 1, identity: '127.0.0.1' })
  expect(JSON.stringify(letter?.payload)).toContain('"n":0')
})

it('are redriven by filter, in order, at the tail of their lane', async () => {
  const dead = await die('redrive', 3)
  await post(server, '/api/v1/lanes/pause', { queue: 'redrive' })
  const waiting = (await submit(server, `${target.origin}/waiting`, { queue: 'redrive' })).body.operationId
  broken = false
  const { status, body } = await post(server, '/api/v1/dead-letters/redrive', { filter: { queue: 'redrive' } })
  expect(status).toBe(200)
  expect(body).toMatchObject({ moved: 3, skipped: 0 })
  expect(await letters('redrive')).toEqual([])
  expect((await operation(server, waiting)).queuePosition).toBe(0)
  for (const [n, id] of dead.entries()) {
    expect(await operation(server, id)).toMatchObject({ status: 'pending', queuePosition: n + 1 })
  }
  await post(server, '/api/v1/lanes/resume', { queue: 'redrive' })
  for (const id of dead) expect((await finishes(server, id)).status).toBe('completed')
  expect(pathsOf('redrive').slice(3)).toEqual([0, 1, 2].map((n) => `/broken/redrive?${n}`))
})

it('are redriven by ids, and invalid ids are skipped', async () => {
  const dead = await die('ids', 2)
  broken = false
  const { body } = await post(server, '/api/v1/dead-letters/redrive', {
    ids: [...dead, 'nonsense', '01890a5d-ac96-774b-bcce-b302099a8057'],
  })
  expect(body).toMatchObject({ moved: 2, skipped: 2 })
  for (const id of dead) expect((await finishes(server, id)).status).toBe('completed')
  expect((await post(server, '/api/v1/dead-letters/redrive', { ids: dead })).body).toMatchObject({
    moved: 0,
    skipped: 2,
  })
  expect((await post(server, '/api/v1/dead-letters/redrive', {})).status).toBe(400)
})

it('die again when they fail again', async () => {
  const [id] = await die('again', 1)
  await post(server, '/api/v1/dead-letters/redrive', { ids: [id] })
  await until('it is dead again', async () => (await letters('again')).length === 1 && pathsOf('again').length === 2)
  expect((await operation(server, id ?? '')).status).toBe('failed')
})

it('retry queues one again; 409 for one that has not failed', async () => {
  const [id] = await die('retry', 1)
  broken = false
  const retried = await post(server, `/api/v1/operations/${id}/retry`)
  expect(retried.status).toBe(200)
  expect((await finishes(server, id ?? '')).status).toBe('completed')
  const refused = await post(server, `/api/v1/operations/${id}/retry`)
  expect(refused.status).toBe(409)
  expect(refused.body.code).toBe('operation_not_failed')
})

it('are purged by filter only', async () => {
  await die('purge', 2)
  await die('spare', 1)
  expect((await call(server, 'DELETE', '/api/v1/dead-letters')).status).toBe(400)
  expect((await call(server, 'DELETE', '/api/v1/dead-letters?queue=purge')).body).toMatchObject({ purged: 2 })
  expect(await letters('purge')).toEqual([])
  expect(await letters('spare')).toHaveLength(1)
})

it('no filter is guessed: a misspelt one purges nothing', async () => {
  await die('kept', 1)
  for (const query of ['queu=kept', 'foo=1', 'limit=1&cursor=x']) {
    const { status, body } = await call(server, 'DELETE', `/api/v1/dead-letters?${query}`)
    expect([query, status]).toEqual([query, 400])
    expect(body.errors).toEqual([expect.objectContaining({ message: 'is not a known member' })])
  }
  expect((await get(server, '/api/v1/operations?unknown=1')).status).toBe(400)
  expect(await letters('kept')).toHaveLength(1)
})

it('ids and a filter together are refused', async () => {
  const ids = await die('both', 1)
  expect((await post(server, '/api/v1/dead-letters/redrive', { ids, queue: 'other' })).status).toBe(400)
  expect(await letters('both')).toHaveLength(1)
})

it.each(['/api/v1/operations?from=', '/api/v1/dead-letters?to='])('%s a leap second is a 400', async (path) => {
  const { status, body } = await get(server, `${path}2026-06-30T23:59:60Z`)
  expect(status).toBe(400)
  expect(body.errors).toHaveLength(1)
})

it('of several retries of one operation at once, one succeeds and the others get the answer that it has not failed', async () => {
  const [id] = await die('retried', 1)
  broken = false
  const answers = await Promise.all(Array.from({ length: 4 }, () => post(server, `/api/v1/operations/${id}/retry`)))
  expect(answers.map((a) => a.status).sort()).toEqual([200, 409, 409, 409])
})
