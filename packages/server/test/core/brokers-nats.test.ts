import { AckPolicy } from '@nats-io/jetstream'
import { headers, nanos } from '@nats-io/transport-node'
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest'
import { eventually, signal } from '../../../spillway/test/pipeline-fixture.js'
import { findNats, type NatsServer, startNats } from '../../../spillway/test/setup/nats.js'
import type { Delivery } from '../../src/brokers/nats/delivery.js'
import { bytes, collect, openRoom, type Room, streamOf, textOf } from '../brokers-nats-fixture.js'

const found = await findNats()

describe.skipIf('missing' in found)('JetStream as the intake', () => {
  let server: NatsServer
  let room: Room

  beforeAll(async () => {
    server = await startNats()
  })
  afterAll(() => server?.stop())
  beforeEach(() => {
    room = openRoom(server.url)
  })
  afterEach(() => room.close())

  describe('what it sets up', () => {
    it('makes a work queue, a stream of dead letters and a consumer without back-offs', async () => {
      const broker = await room.broker({ maxDeliver: 4 })
      const jsm = await room.jsm()
      const stream = await streamOf(room)
      const intake = await jsm.streams.info(stream)
      const dead = await jsm.streams.info(`${stream}_DLQ`)
      const { config } = await jsm.consumers.info(stream, broker.consumer)
      expect(intake.config).toMatchObject({
        subjects: [room.subject],
        retention: 'workqueue',
        storage: 'file',
        duplicate_window: nanos(120_000),
      })
      expect(dead.config).toMatchObject({ subjects: [`${room.subject}.dlq`], retention: 'limits', storage: 'file' })
      expect(config).toMatchObject({ ack_policy: 'explicit', ack_wait: nanos(30_000), max_deliver: 4 })
      expect(config.backoff ?? []).toEqual([])
    })

    it('gives the default subject the plain names', async () => {
      const broker = await room.broker({ subject: 'beamline.router.v1.decide' })
      const jsm = await room.jsm()
      expect(broker.consumer).toBe('spillway-router')
      await expect(jsm.streams.find('beamline.router.v1.decide')).resolves.toBe('SPILLWAY_ROUTER')
      await expect(jsm.streams.find('beamline.router.v1.decide.dlq')).resolves.toBe('SPILLWAY_ROUTER_DLQ')
    })

    it('refuses a subject with a wildcard', async () => {
      await expect(room.broker({ subject: 'a.*' })).rejects.toThrow(TypeError)
    })

    it('updates the settings of existing ones', async () => {
      const first = await room.broker({ maxDeliver: 9, ackWaitMs: 9_000 })
      await first.close()
      const jsm = await room.jsm()
      const stream = await streamOf(room)
      await jsm.streams.update(stream, { duplicate_window: nanos(1_000) })
      await jsm.consumers.update(stream, first.consumer, { backoff: [nanos(100), nanos(200)] })
      await room.broker({ maxDeliver: 4, ackWaitMs: 7_000 })
      const { config } = await jsm.consumers.info(stream, first.consumer)
      expect((await jsm.streams.info(stream)).config.duplicate_window).toBe(nanos(120_000))
      expect(config).toMatchObject({ max_deliver: 4, ack_wait: nanos(7_000) })
      expect(config.backoff ?? []).toEqual([])
    })

    it('keeps settings that cannot be changed, works with them, and logs it', async () => {
      const probe = await room.broker()
      const stream = await streamOf(room)
      await probe.close()
      const jsm = await room.jsm()
      await jsm.streams.delete(stream)
      await jsm.streams.add({ name: stream, subjects: [room.subject], storage: 'memory', retention: 'limits' })
      const broker = await room.broker({ exhaustedLookMs: 5 })
      const warned = room.logged.find(({ message }) => message.includes('cannot be changed'))
      expect(warned?.fields.differs).toEqual(['retention', 'storage'])
      const { texts } = collect(broker)
      // What is acked stays in such a stream: over many looks it is not taken for exhausted.
      for (let i = 1; i <= 50; i += 1) {
        await broker.publish({ data: bytes('kept') })
        await eventually(() => texts.length === i || undefined, 'the message')
      }
      expect(await room.stored()).toBe(50)
      expect(await broker.deadLetters.list(10, null)).toEqual([])
    })

    it('lets several start at once', async () => {
      const brokers = await Promise.all(Array.from({ length: 6 }, () => room.broker({ wait: false })))
      await Promise.all(brokers.map((broker) => eventually(() => broker.isConnected || undefined, 'all connected')))
      expect(room.logged.filter(({ level }) => level !== 'info')).toEqual([])
    })

    it('limits how many are handed out and not acked, over all routers', async () => {
      const broker = await room.broker({ wait: false })
      await broker.limitAckPending(5)
      await eventually(() => broker.isConnected || undefined, 'it to be connected')
      const jsm = await room.jsm()
      const stream = await streamOf(room)
      expect((await jsm.consumers.info(stream, broker.consumer)).config.max_ack_pending).toBe(5)
      await broker.limitAckPending(3)
      for (let i = 0; i < 10; i += 1) await broker.publish({ data: bytes(`${i}`) })
      const finish = signal()
      const taking = broker.take(10, () => finish.promise)
      await eventually(async () => (await broker.backlog())?.ackPending === 3 || undefined, 'three to be handed out')
      expect(await broker.backlog()).toMatchObject({ ackPending: 3, pending: 7, delivered: 3, redelivered: 0 })
      finish.fire()
      await taking.stop()
    })
  })

  describe('publishing', () => {
    it('hands over data, headers, deadline, count and time', async () => {
      const broker = await room.broker()
      const before = Date.now()
      const deadlineMs = before + 5_000
      await broker.publish({ data: bytes('hello'), id: 'one', headers: { 'X-Tenant': 'acme' }, deadlineMs })
      const taken = signal<Delivery>()
      broker.take(1, async (delivery) => {
        taken.fire(delivery)
        delivery.ack()
      })
      const delivery = await taken.promise
      expect(textOf(delivery.data)).toBe('hello')
      expect(delivery.header('x-tenant')).toBe('acme')
      expect(delivery.header('NATS-MSG-ID')).toBe('one')
      expect(delivery.header('spillway-deadline')).toBe(`${deadlineMs}`)
      expect(delivery.header('absent')).toBeUndefined()
      expect(delivery).toMatchObject({ deliveries: 1, id: '1' })
      expect(Math.abs(delivery.storedAtMs - before)).toBeLessThan(5_000)
    })

    it('drops a second one with the same id', async () => {
      const broker = await room.broker()
      expect(await broker.publish({ data: bytes('a'), id: 'same' })).toEqual({ duplicate: false, sequence: 1 })
      expect(await broker.publish({ data: bytes('b'), id: 'same' })).toMatchObject({ duplicate: true })
      expect(await room.stored()).toBe(1)
    })

    it('keeps those without an id apart', async () => {
      const broker = await room.broker()
      await broker.publish({ data: bytes('a') })
      await broker.publish({ data: bytes('a') })
      expect(await room.stored()).toBe(2)
    })

    it('refuses a message that is too large before it is sent, and stays connected', async () => {
      const broker = await room.broker()
      const max = broker.payloadBytesMax ?? 0
      await expect(broker.publish({ data: new Uint8Array(max) })).rejects.toMatchObject({ code: 'too_large' })
      expect(broker.isConnected).toBe(true)
      await expect(broker.publish({ data: new Uint8Array(max - 200) })).resolves.toMatchObject({ duplicate: false })
    })

    it('says unavailable when the stream is gone, and makes it again', async () => {
      const broker = await room.broker()
      await (await room.jsm()).streams.delete(await streamOf(room))
      await expect(broker.publish({ data: bytes('a') })).rejects.toMatchObject({ code: 'unavailable' })
      const again = () =>
        broker.publish({ data: bytes('a') }).then(
          () => true,
          () => undefined,
        )
      await eventually(again, 'the stream to be there again')
    })
  })

  describe('asking', () => {
    it('gives each of many the answer to its own question', async () => {
      const [gateway, router] = [await room.broker(), await room.broker()]
      router.take(16, async (delivery) => {
        router.answer(delivery, bytes(`re: ${textOf(delivery.data)}`))
        delivery.ack()
      })
      const asked = Array.from({ length: 200 }, (_, i) => gateway.ask({ data: bytes(`${i}`) }, 10_000))
      expect((await Promise.all(asked)).map(textOf)).toEqual(Array.from({ length: 200 }, (_, i) => `re: ${i}`))
    })

    it('gives up after its time', async () => {
      const broker = await room.broker()
      await expect(broker.ask({ data: bytes('?') }, 100)).rejects.toMatchObject({ code: 'timeout' })
    })

    it('stops when no caller waits any more', async () => {
      const broker = await room.broker()
      const gone = new AbortController()
      const asked = broker.ask({ data: bytes('?') }, 60_000, gone.signal)
      gone.abort()
      await expect(asked).rejects.toMatchObject({ code: 'aborted' })
    })

    it('does not wait for an answer that goes to another', async () => {
      const broker = await room.broker()
      await broker.publish({ data: bytes('?'), id: 'same' })
      await expect(broker.ask({ data: bytes('?'), id: 'same' }, 60_000)).rejects.toMatchObject({ code: 'timeout' })
    })

    it('writes answers to inboxes only', async () => {
      const broker = await room.broker()
      const nc = await room.nc()
      const heard: string[] = []
      nc.subscribe('victim.>', { callback: (_, message) => void heard.push(textOf(message.data)) })
      await nc.flush()
      const answered = signal()
      broker.take(1, async (delivery) => {
        broker.answer(delivery, bytes('to whom?'))
        delivery.ack()
        answered.fire()
      })
      await broker.publish({ data: bytes('?'), headers: { 'Spillway-Reply-To': 'victim.subject' } })
      await answered.promise
      // A question and its answer, after it on the same connections.
      await eventually(async () => (await broker.backlog())?.ackPending === 0 || undefined, 'the ack')
      await nc.flush()
      expect(heard).toEqual([])
    })

    it('does not send an answer that is too large', async () => {
      const broker = await room.broker()
      const failure = signal<unknown>()
      broker.take(1, async (delivery) => {
        try {
          broker.answer(delivery, new Uint8Array(2 * 1_048_576))
        } catch (error) {
          failure.fire(error)
        }
        delivery.ack()
      })
      const asked = broker.ask({ data: bytes('?') }, 1_000).catch(() => undefined)
      expect(await failure.promise).toMatchObject({ code: 'too_large' })
      expect(broker.isConnected).toBe(true)
      await asked
    })
  })

  describe('a stranger', () => {
    it('may send headers that cannot be read', async () => {
      const broker = await room.broker()
      const nc = await room.nc()
      const odd = Object.assign(headers(), { encode: () => bytes('NATS/1.0\r\nnot a name: x\r\n\r\n') })
      await nc.request(room.subject, bytes('body'), { headers: odd, timeout: 2_000 })
      broker.take(1, async (delivery) => {
        expect(delivery.header('x-fine')).toBeUndefined()
        await broker.bury(delivery, { reason: 'bad', detail: 'unreadable' })
      })
      const dead = await eventually(async () => (await broker.deadLetters.list(1, null))[0], 'the dead letter')
      expect(textOf(dead.data)).toBe('body')
    })

    it('may give orders to the server in headers: they do not keep the message from being buried', async () => {
      const broker = await room.broker()
      const nc = await room.nc()
      const orders = headers()
      orders.append('Nats-Expected-Stream', await streamOf(room))
      orders.append('Nats-Msg-Id', 'theirs')
      await nc.request(room.subject, bytes('body'), { headers: orders, timeout: 2_000 })
      broker.take(1, (delivery) => broker.bury(delivery, { reason: 'bad', detail: '' }))
      const dead = await eventually(async () => (await broker.deadLetters.list(1, null))[0], 'the dead letter')
      expect(dead.headers).toEqual({ 'Nats-Expected-Stream': await streamOf(room), 'Nats-Msg-Id': 'theirs' })
      expect(await broker.deadLetters.redrive([dead.id])).toEqual({ moved: 1, skipped: 0 })
    })

    it('cannot store a message that could not be buried', async () => {
      const broker = await room.broker()
      const nc = await room.nc()
      const max = broker.payloadBytesMax ?? 0
      const refused = await nc.request(room.subject, new Uint8Array(max + 1), { timeout: 2_000 })
      expect(refused.json()).toMatchObject({ error: { err_code: 10054 } })
      await nc.request(room.subject, new Uint8Array(max), { timeout: 2_000 })
      broker.take(1, (delivery) => broker.bury(delivery, { reason: 'r'.repeat(500), detail: '字'.repeat(5_000) }))
      const dead = await eventually(async () => (await broker.deadLetters.list(1, null))[0], 'the dead letter')
      expect(dead.data.length).toBe(max)
    })
  })

  it('keeps the password out of the logs', async () => {
    const locked = await startNats({ settings: ['authorization { user: router, password: "s3cret-1" }'] })
    const own = openRoom(`nats://router:s3cret-1@127.0.0.1:${locked.port}`)
    const refused = openRoom(`nats://router:wr0ng-2@127.0.0.1:${locked.port}`)
    try {
      await own.broker()
      await refused.broker({ wait: false })
      await eventually(() => refused.logged[0], 'the refusal to be logged')
      const said = JSON.stringify([
        own.logged,
        refused.logged.map(({ fields }) => ({ ...fields, err: `${fields.err}` })),
      ])
      expect(said).toContain(`127.0.0.1:${locked.port}`)
      expect(said).not.toMatch(/s3cret-1|wr0ng-2/)
    } finally {
      await Promise.all([own.close(), refused.close()])
      await locked.stop()
    }
  })

  it('uses a consumer that another made, of the right kind', async () => {
    const probe = await room.broker()
    const stream = await streamOf(room)
    await probe.close()
    const jsm = await room.jsm()
    await jsm.consumers.delete(stream, probe.consumer)
    await jsm.consumers.add(stream, { durable_name: probe.consumer, ack_policy: AckPolicy.Explicit })
    const broker = await room.broker()
    const { texts } = collect(broker)
    await broker.publish({ data: bytes('a') })
    await eventually(() => texts.length === 1 || undefined, 'the message')
  })
})
