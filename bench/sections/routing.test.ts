import { once } from 'node:events'
import { connect } from 'node:net'
import { describe, expect, it } from 'vitest'
import { checkTask } from '../../packages/server/dist/workloads/routing/envelope.js'
import { findNats } from '../../packages/spillway/test/setup/nats.js'
import { startBenchNats } from '../nats.js'
import { requestPrefix, taskBody, tenants } from '../programs/routing-body.js'
import { startHung } from './routing-overload.js'
import { gaugeIn, withBroker } from './routing-sites.js'

describe('taskBody', () => {
  const prefix = requestPrefix()
  const bodies = Array.from({ length: 1_000 }, (_, n) => taskBody(prefix, n))
  const tasks = bodies.map((body) => JSON.parse(body) as { request_id: string; tenant_id: string })

  it('is a task as decide takes it', () => {
    expect(checkTask(tasks[0])).toMatchObject({ ok: true })
  })

  it('has one length, whatever its number', () => {
    expect(new Set(bodies.map((body) => body.length)).size).toBe(1)
  })

  it('has a request id of its own', () => {
    expect(new Set(tasks.map(({ request_id }) => request_id)).size).toBe(1_000)
  })

  it('comes from all tenants in turn', () => {
    expect(new Set(tasks.slice(0, tenants).map(({ tenant_id }) => tenant_id)).size).toBe(tenants)
  })
})

describe('gaugeIn', () => {
  const metrics = 'up_max 7\n# HELP up x\nup{status="well",at="a"} 1\nup{status="ill",at="a"} 0\n'

  it('is not that of a longer name', () => {
    expect(gaugeIn(metrics, 'up')).toBe(1)
  })

  it('is that with the labels', () => {
    expect(gaugeIn(metrics, 'up', 'status="ill"')).toBe(0)
  })

  it('is null where there is none', () => {
    expect(gaugeIn(metrics, 'down')).toBeNull()
  })
})

describe('startHung', () => {
  it('counts callers, and reports nothing until it is closed', async () => {
    const hung = await startHung()
    const socket = connect(Number(new URL(hung.url).port), '127.0.0.1')
    let heard = 0
    socket.on('data', () => {
      heard += 1
    })
    const closed = once(socket, 'close')
    await once(socket, 'connect')
    socket.write('GET /metrics HTTP/1.1\r\n\r\n')
    await expect.poll(() => hung.asked()).toBe(1)
    await hung.close()
    await closed
    expect(heard).toBe(0)
  })
})

const found = await findNats()

describe.skipIf('missing' in found)('startBenchNats', () => {
  it('has JetStream, returns its process id, and leaves no process behind', async () => {
    const nats = await startBenchNats()
    try {
      expect(await withBroker(nats, async (_, jsm) => (await jsm.getAccountInfo()).streams)).toBe(0)
      expect(process.kill(nats.pid, 0)).toBe(true)
    } finally {
      await nats.stop()
    }
    expect(() => process.kill(nats.pid, 0)).toThrow('ESRCH')
  })
})
