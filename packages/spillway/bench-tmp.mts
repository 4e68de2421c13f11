import { startNats } from './test/setup/nats.js'
import { connectNats } from './src/brokers/nats/index.js'
import { connect, headers, nuid } from '@nats-io/transport-node'
import { jetstream, jetstreamManager } from '@nats-io/jetstream'
const s = await startNats()
const log = { info() {}, warn: console.warn, error: console.error }
const data = new Uint8Array(300).fill(97), N = 20000
const run = async (name: string, ask: () => Promise<unknown>) => {
  const lat: number[] = []; let left = N; const t0 = performance.now()
  await Promise.all(Array.from({ length: 64 }, async () => { while (left-- > 0) { const t = performance.now(); await ask(); lat.push(performance.now() - t) } }))
  lat.sort((a, b) => a - b)
  console.log(name, Math.round(N / (performance.now() - t0) * 1000), '/s p50', lat[N / 2 | 0]?.toFixed(2), 'p99', lat[N * .99 | 0]?.toFixed(2))
}
// bare
const nc = await connect({ servers: [s.url.slice(7)] }); const nc2 = await connect({ servers: [s.url.slice(7)] })
const jsm = await jetstreamManager(nc); await jsm.streams.add({ name: 'B', subjects: ['b.x'], retention: 'workqueue', storage: 'file' })
await jsm.consumers.add('B', { durable_name: 'c', ack_policy: 'explicit', max_ack_pending: 1000 })
const js = jetstream(nc); const inbox = '_INBOX.' + nuid.next(); const w = new Map<string, (d: Uint8Array) => void>()
nc.subscribe(inbox + '.*', { callback: (_e, m) => { const f = w.get(m.subject); w.delete(m.subject); f?.(m.data) } })
const c = await jetstream(nc2).consumers.get('B', 'c')
const it = await c.consume({ max_messages: 128, callback: (m) => { nc2.publish(m.headers!.get('Spillway-Reply-To'), m.data); m.ack() } })
let n = 0
const bareAsk = () => new Promise<Uint8Array>((res, rej) => { const r = `${inbox}.${n++}`; w.set(r, res); const h = headers(); h.set('Spillway-Reply-To', r); js.publish('b.x', data, { headers: h, msgID: `b${n}` }).catch(rej) })
const gw = connectNats({ url: s.url, maxDeliver: 3, log }), rt = connectNats({ url: s.url, maxDeliver: 3, log })
while (!gw.isConnected || !rt.isConnected) await new Promise(r => setTimeout(r, 5))
rt.take(64, async d => { rt.answer(d, d.data); d.ack() })
await run('warm', bareAsk); await run('warm', () => gw.ask({ data }, 5000))
for (let i = 0; i < 3; i++) { await run('bare', bareAsk); await run('ours', () => gw.ask({ data, deadlineMs: 1 }, 5000)) }
await gw.close(); await rt.close(); await it.close(); await nc.close(); await nc2.close(); await s.stop()
