/** The shop in production: one pool for its own queries and for the intake. */
import pg from 'pg'
import { createIntake, postgres } from 'spillway'
import { buildShop, makeTables } from './shop.js'

const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL, max: 16 })
await makeTables(pool)
const intake = await createIntake({ store: postgres({ pool }) })
const server = buildShop({ intake, pool }).app.listen(3000, () => console.log('http://127.0.0.1:3000'))
intake.guard(server)
process.once('SIGTERM', async () => {
  await intake.close()
  server.close()
  await pool.end()
})
