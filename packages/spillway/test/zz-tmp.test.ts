import { it } from 'vitest'
import { openMessageTables, push, pop, take, calm, configure, transaction, ackOf, pushed } from './message-calls.js'
import { endAll, startServer, until, get } from './server-process.js'
import { freshDatabase } from './setup/database.js'
it('x', async () => {
  const database = await freshDatabase()
  const tables = openMessageTables(database.url)
  const server = await startServer({ DATABASE_URL: database.url, ...calm })
  await push(server, Array.from({ length: 75 }, () => ({ queue: 'big', payload: 0 })))
  await tables.query(`UPDATE mq_messages SET payload = '"' || repeat('x', 7900000) || '"'`)
  let ended: unknown = null
  void server.ended.then((e) => { ended = e })
  const t = performance.now()
  const a = await pop(server, 'big', { batch: 100 }, 60_000).catch((e: unknown) => ({ status: String(e), text: '' }))
  console.log('big pop', a.status, a.text.slice(0, 300), a.text.length, Math.round(performance.now() - t), ended)
  console.log(JSON.stringify(server.logs().filter((l) => Number(l.level) > 30)).slice(-1500), server.stderr().slice(-800))
  const h = await get(server, '/health').catch((e: unknown) => ({ status: String(e) }))
  console.log('health', h.status, ended)
  console.log(await tables.query('SELECT cardinality(open) n, lease FROM mq_cursors'))
  await tables.close(); await endAll(); await database.drop()
}, 200_000)
