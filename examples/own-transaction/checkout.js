/**
 * An order and the work that follows from it, in one transaction of your own: the receipt is sent if and only if the
 * order exists. `ctx.tx` does the same at the other end: the receipt is written if and only if the operation is done.
 */
import assert from 'node:assert/strict'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import pg from 'pg'
import { createIntake, embedded } from 'spillway'
import Type from 'typebox'

// Your service has a PostgreSQL of its own; here one is started for the occasion.
const dataDir = await mkdtemp(join(tmpdir(), 'spillway-own-transaction-'))
const nothing = () => undefined
const store = await embedded({ dataDir })

const pool = new pg.Pool({ connectionString: store.url })
// Without a listener the loss of an idle connection, here at the server's stop, ends the process.
pool.on('error', nothing)
const intake = await createIntake({ store })

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

async function receipts() {
  return (await pool.query('SELECT order_id, operation FROM receipts ORDER BY order_id')).rows
}

try {
  await pool.query('CREATE TABLE orders (id text PRIMARY KEY)')
  await pool.query('CREATE TABLE receipts (order_id text PRIMARY KEY REFERENCES orders, operation uuid NOT NULL)')

  await assert.rejects(checkout('declined', { fail: true }), /declined/)
  const operation = await checkout('paid')
  console.log(`"paid" is committed, and with it operation ${operation}`)

  while ((await receipts()).length === 0) await delay(10)
  assert.deepEqual(await receipts(), [{ order_id: 'paid', operation }])
  console.log('its receipt exists; the declined order left neither a row nor an operation')
} finally {
  await pool.end()
  // Stops the server, too: it belongs to the store.
  await intake.close()
  await rm(dataDir, { recursive: true, force: true })
}
