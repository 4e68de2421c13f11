import { Children } from './children.js'
import { createContext } from './context.js'
import { openPostgres } from './database.js'
import { startRedis } from './redis.js'
import { startSites, flowThrough, stateOf } from './sections/generation-sites.js'
const pg = await openPostgres(null)
const children = new Children()
const context = createContext({ quick: true, postgres: pg, children, load: null as never, say: (t) => console.log(t) })
const redis = await startRedis(console.log)
if ('absent' in redis) throw new Error(redis.absent)
try {
  const sites = await startSites(context, redis)
  const ways = [sites.straight, sites.pipe, sites.number, sites.direct, sites.relay, ...(sites.redis ? [sites.redis.direct, sites.redis.relay, sites.redis.resumable] : [])]
  const args = process.argv.slice(2)
  const [streams = 100, every = 50, seconds = 3] = args.slice(0, 3).map(Number)
  for (let r = 0; r < 2; r++)
  for (const way of ways.filter((w) => args.length < 4 || w.name.includes(args[3] ?? ''))) {
    try {
      const f = await flowThrough(sites, way, { streams, every, seconds, settleSeconds: 1 })
      const late = (await stateOf(sites.upstream)).lateP99Ms
      console.log(way.name.padEnd(50), JSON.stringify({ ps: Math.round(f.perSecond), p50: +f.p50Ms.toFixed(2), p99: +f.p99Ms.toFixed(2), ramp: Math.round(f.rampMs), cpuUs: f.cpuSeconds.map((s) => Math.round((s / f.tokens) * 1e6)), own: Math.round(f.ownCpuSeconds / f.tokens * 1e6), late: +late.toFixed(2) }))
    } catch (e) { console.log(way.name, String(e)) }
  }
} finally { await children.close(); await redis.stop(); await pg.close() }
