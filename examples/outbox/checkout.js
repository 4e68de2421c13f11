/**
 * An order and the work that follows from it, in one transaction of your own: the receipt is sent if and only if the order
 * exists. `ctx.tx` does the same at the other end: the receipt is written if and only if the operation is done.
 */
import assert from 'node:assert/strict'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { startEmbedded } from '@spillway/embedded-postgres'
import pg from 'pg'
import { createIntake, postgres } from 'spillway'
import Type from 'typebox'

// Your service has a PostgreSQL of its own; here one is started for the occasion.
const dataDir = await mkdtemp(join(tmpdir(), 'spillway-outbox-'))
const server = await startEmbedded({ dataDir })
const pool = new pg.Pool({ connectionString: server.url, max: 12 })
// node-postgres ends the process if a connection is lost while nobody listens.
pool.on('error', (error) => console.error(error.message))
const intake = await createIntake({ store: postgres({ pool }) })

const sendReceipt = intake.define('receipts.send', {
  body: Type.Object({ order: Type.String() }),
  lane: (receipt) => ['receipts', receipt.order],
  run: async (receipt, { id, tx }) => {
    await tx.query('INSERT INTO receipts (order_id, operation) VALUES ($1, $2)', [receipt.order, id])
  },
})

async function checkout(order, { fail = false } = {}) {
  const client = await pool.connect()
  try {
    await client.query('BEGIN')
    await client.query('INSERT INTO orders (id) VALUES ($1)', [order])
    const answer = await intake.enqueue(sendReceipt, { order }, { tx: client })
    // A refusal (a full queue, a used-up quota) is a value, and yours to decide about.
    if (answer.kind === 'refused') throw new Error(answer.refusal.detail)
    if (fail) throw new Error('the card was declined')
    await client.query('COMMIT')
    return answer.operationId
  } catch (error) {
    await client.query('ROLLBACK')
    throw error
  } finally {
    client.release()
  }
}

try {
  await pool.query('CREATE TABLE orders (id text PRIMARY KEY)')
  await pool.query('CREATE TABLE receipts (order_id text PRIMARY KEY REFERENCES orders, operation uuid NOT NULL)')

  await assert.rejects(checkout('declined', { fail: true }), /declined/)
  const operation = await checkout('paid')
  console.log(`"paid" is committed, and with it operation ${operation}`)

  const { status } = await intake.tickets.wait(operation)
  assert.equal(status, 'completed')
  const { rows } = await pool.query('SELECT order_id, operation FROM receipts')
  assert.deepEqual(rows, [{ order_id: 'paid', operation }])
  console.log('its receipt exists; the declined order left neither a row nor an operation')
} finally {
  await intake.close()
  // The pool is yours: end it after the intake.
  await pool.end()
  await server.stop()
  await rm(dataDir, { recursive: true, force: true })
}
