/** Routes and their work, on an intake and a pool that are given: the server's own, or those of a test. */
import express from 'express'
import { FailOperation } from 'spillway'
import Type from 'typebox'

export function buildShop({ intake, pool }) {
  const reserve = intake.define('stock.reserve', {
    body: Type.Object({ item: Type.String({ minLength: 1 }), pieces: Type.Integer({ minimum: 1 }) }),
    lane: (order) => ['stock', order.item],
    identity: (request) => request.headers['x-customer'] ?? 'nobody',
    // The pieces are taken and the operation is completed in one commit: once, whatever crashes.
    run: async ({ item, pieces }, { tx }) => {
      const take = 'UPDATE stock SET pieces = pieces - $2 WHERE item = $1 AND pieces >= $2 RETURNING pieces'
      const { rows } = await tx.query(take, [item, pieces])
      if (rows.length === 0) throw new FailOperation(`There are no ${pieces} of ${item}.`)
      return { item, left: rows[0].pieces }
    },
  })
  const app = express()
  app.post('/reservations', intake.express(reserve))
  app.use(intake.expressTickets())
  app.get('/stock/:item', async (request, response) => {
    const { rows } = await pool.query('SELECT pieces FROM stock WHERE item = $1', [request.params.item])
    response.json({ pieces: rows[0]?.pieces ?? 0 })
  })
  return { app, reserve }
}

export const makeTables = (pool) =>
  pool.query('CREATE TABLE IF NOT EXISTS stock (item text PRIMARY KEY, pieces int NOT NULL)')
