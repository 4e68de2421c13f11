import { it } from 'vitest'
import { push, pop, calm, messagesOf } from './message-calls.js'
import { endAll, startServer } from './server-process.js'
import { freshDatabase } from './setup/database.js'
it('x', async () => {
  const database = await freshDatabase()
  const server = await startServer({ DATABASE_URL: database.url, ...calm })
  for (let b = 0; b < 6; b++) {
    const t = performance.now()
    const a = await push(server, Array.from({ length: 1000 }, (_, n) => ({ queue: 'q', partition: `p${b * 1000 + n}`, payload: n })))
    console.log('push 1000 lanes', a.status, Math.round(performance.now() - t))
  }
  for (const n of [100, 100, 500, 500, 1000, 1000, 1000]) {
    const t = performance.now()
    const a = await pop(server, 'q', { batch: n, partitions: n, autoAck: true })
    console.log('pop', n, a.status, messagesOf(a).length, Math.round(performance.now() - t), a.status === 503 ? a.text : '')
  }
  await endAll(); await database.drop()
}, 200_000)
