/** rate-limiter-flexible on PostgreSQL: how many it decides, and whether its limit holds. It decides; it stores no work. */
import pg from 'pg'
import { RateLimiterPostgres, RateLimiterRes } from 'rate-limiter-flexible'
import { env } from './env.js'
import { bareApp, listen } from './handler-app.js'
import { onMeasure, rowsIn } from './measured.js'

const users = 200
const waiting = 64
const windowSeconds = 3_600
const poolSizes = [8, 16, 32]

function limiter(pool: pg.Pool, tableName: string, points: number): Promise<RateLimiterPostgres> {
  return new Promise((resolve, reject) => {
    const made: RateLimiterPostgres = new RateLimiterPostgres(
      { storeClient: pool, tableName, points, duration: windowSeconds },
      (fault) => (fault === undefined ? resolve(made) : reject(fault)),
    )
  })
}

async function isTaken(limits: RateLimiterPostgres, key: string): Promise<boolean> {
  try {
    await limits.consume(key)
    return true
  } catch (refusal) {
    if (refusal instanceof RateLimiterRes) return false
    throw refusal
  }
}

const pools = poolSizes.map((max) => new pg.Pool({ connectionString: env('DATABASE_URL'), max }))
const [first = new pg.Pool()] = pools
const limited = await limiter(first, 'limited', Number(env('LIMIT')))
const app = bareApp()
let asked = 0

for (const [index, pool] of pools.entries()) {
  const open = await limiter(pool, 'open', 100_000_000)
  onMeasure(app, `consume-${poolSizes[index]}`, ({ seconds }) =>
    rowsIn(seconds, waiting, async () => {
      asked += 1
      if (!(await isTaken(open, `user-${asked % users}`))) throw new Error('refused, far below the limit')
      return 1
    }),
  )
}

onMeasure(app, 'exact', async ({ count, key }) => {
  let tried = 0
  let taken = 0
  const loop = async (): Promise<void> => {
    while (tried < count) {
      tried += 1
      if (await isTaken(limited, key)) taken += 1
    }
  }
  await Promise.all(Array.from({ length: waiting }, loop))
  return { taken, tried }
})

await listen(app, async () => {
  await Promise.all(pools.map((pool) => pool.end()))
})
