import { afterAll, beforeAll, expect, it } from 'vitest'
import { type Fleet, native, type SseStream, startFleet } from './generation-server.js'
import { type ServerProcess, until } from './server-process.js'
let fleet: Fleet
let server: ServerProcess
beforeAll(async () => {
  fleet = await startFleet()
  server = await fleet.start({ GENERATION_CONCURRENCY: '4', CONNECTION_POOL_MAX_PER_USER: '1' })
})
afterAll(() => fleet.close())
it('a user does not get more than it may by way of the queue', async () => {
  const users = ['a', 'b', 'c', 'd']
  const held: SseStream[] = []
  for (const user of users) {
    const s = await native(server, user, `marker=held-${user} tokens=1 end=hang`)
    await s.seen('token', ({ content }) => content !== '')
    held.push(s)
  }
  const greedy = await Promise.all([1, 2, 3, 4].map((n) => native(server, 'greedy', `marker=greedy-${n} tokens=1 end=hang`)))
  expect(greedy.map((s) => s.layer)).toEqual(Array(4).fill('3-Queue-Failover'))
  for (const user of users) fleet.upstream.release(`held-${user}`)
  await fleet.asked('greedy-1').catch(() => undefined)
  const most = await until('more than one', () => {
    const n = fleet.upstream.requests.filter((r) => r.marker.startsWith('greedy') && r.outcome === 'open').length
    return n > 1 && n
  }, 4000).catch(() => 1)
  console.log('MOST AT ONCE', most)
})
