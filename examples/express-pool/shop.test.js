import { once } from 'node:events'
import pg from 'pg'
import { createTestIntake } from 'spillway/testing'
import { afterAll, beforeAll, beforeEach, expect, inject, test } from 'vitest'
import { buildShop, makeTables } from './shop.js'

const pool = new pg.Pool({ connectionString: inject('url') })
const testing = await createTestIntake({ url: inject('url') })
const { app, reserve } = buildShop({ intake: testing.intake, pool })
let server

beforeAll(async () => {
  server = app.listen(0, '127.0.0.1')
  await once(server, 'listening')
  await makeTables(pool)
})
beforeEach(async () => {
  await testing.reset()
  await pool.query(`TRUNCATE stock; INSERT INTO stock VALUES ('tea', 5)`)
})
afterAll(async () => {
  await testing.close()
  server.close()
  await pool.end()
})

function call(path, body) {
  const headers = { 'content-type': 'application/json', 'x-customer': 'ann' }
  return fetch(`http://127.0.0.1:${server.address().port}${path}`, {
    method: 'POST',
    headers,
    body: JSON.stringify(body),
  })
}

test('a reservation takes from the stock', async () => {
  const answer = await call('/reservations', { item: 'tea', pieces: 2 })
  expect(await answer.json()).toMatchObject({ status: 'executed', result: { item: 'tea', left: 3 } })
})

test('nobody gets what there is not', async () => {
  const answer = await testing.intake.submit(reserve, { item: 'tea', pieces: 6 })
  expect(answer).toMatchObject({ kind: 'failed', error: 'There are no 6 of tea.' })
})

test('a reservation for tomorrow is made tomorrow', async () => {
  const { operationId } = await testing.intake.submit(reserve, { item: 'tea', pieces: 1 }, { delay: '24h' })
  await testing.clock.advance('24h')
  await testing.drain()
  expect(await testing.intake.tickets.get(operationId)).toMatchObject({ status: 'completed', result: { left: 4 } })
})
