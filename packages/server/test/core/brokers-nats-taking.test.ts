import { jetstream } from '@nats-io/jetstream'
import { headers as newHeaders } from '@nats-io/transport-node'
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest'
import { eventually, signal } from '../../../spillway/test/pipeline-fixture.js'
import { findNats, type NatsServer, startNats } from '../../../spillway/test/setup/nats.js'
import type { RouterBroker } from '../../src/brokers/nats/broker.js'
import type { Delivery } from '../../src/brokers/nats/delivery.js'
import { bytes, collect, openRoom, type Room, streamOf, textOf } from '../brokers-nats-fixture.js'

const found = await findNats()
const why = { reason: 'broken', detail: 'line one\nline two' }

describe.skipIf('missing' in found)('messages taken from JetStream', () => {
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

  const publishAll = async (broker: RouterBroker, count: number): Promise<string[]> => {
    const texts = Array.from({ length: count }, (_, i) => `message ${i}`)
    await Promise.all(texts.map((text) => broker.publish({ data: bytes(text) })))
    return texts
  }

  describe('takers', () => {
    it('share the messages: none is handed to two of them', async () => {
      const brokers = [await room.broker(), await room.broker()] as const
      const published = await publishAll(brokers[0], 300)
      const [one, two] = brokers.map((broker) => collect(broker, 4))
      const all = () => [...(one?.texts ?? []), ...(two?.texts ?? [])]
      await eventually(async () => ((await room.stored()) === 0 ? true : undefined), 'all to be acked')
      expect(all().sort()).toEqual(published.sort())
      expect(one?.texts.length).toBeGreaterThan(0)
      expect(two?.texts.length).toBeGreaterThan(0)
    })

    it('work on no more than their limit, and take no more than twice that', async () => {
      const broker = await room.broker()
      await publishAll(broker, 20)
      const finish = signal()
      let underWay = 0
      const taking = broker.take(3, async (delivery) => {
        underWay += 1
        await finish.promise
        delivery.ack()
      })
      await eventually(async () => (await broker.backlog())?.ackPending === 6 || undefined, 'six to be taken')
      expect(underWay).toBe(3)
      expect(await broker.backlog()).toMatchObject({ pending: 14 })
      finish.fire()
      await eventually(async () => ((await room.stored()) === 0 ? true : undefined), 'the rest')
      await taking.stop()
    })

    it('finish running work when they stop, and return the rest', async () => {
      const broker = await room.broker()
      await publishAll(broker, 4)
      const finish = signal()
      const [started, finished]: [string[], string[]] = [[], []]
      const taking = broker.take(2, async (delivery) => {
        started.push(textOf(delivery.data))
        await finish.promise
        finished.push(textOf(delivery.data))
        delivery.ack()
      })
      await eventually(async () => (await broker.backlog())?.ackPending === 4 || undefined, 'all to be taken')
      const stopped = taking.stop()
      finish.fire()
      await stopped
      expect(finished).toHaveLength(2)
      expect(started).toEqual(finished)
      const rest = collect(await room.broker())
      await eventually(() => rest.texts.length === 2 || undefined, 'what was given back')
      expect([...rest.texts, ...finished].sort()).toEqual(['message 0', 'message 1', 'message 2', 'message 3'])
    })
  })

  describe('a delivery', () => {
    it('that is not acked is redelivered after the ack wait, counted', async () => {
      const broker = await room.broker({ ackWaitMs: 500 })
      await broker.publish({ data: bytes('again') })
      const seen: { deliveries: number; at: number }[] = []
      broker.take(1, async (delivery) => {
        seen.push({ deliveries: delivery.deliveries, at: performance.now() })
        if (seen.length > 1) delivery.ack()
      })
      await eventually(() => seen.length === 2 || undefined, 'the second delivery')
      expect(seen.map(({ deliveries }) => deliveries)).toEqual([1, 2])
      expect((seen[1]?.at ?? 0) - (seen[0]?.at ?? 0)).toBeGreaterThan(450)
    })

    it('that is put back is redelivered after its delay, not before', async () => {
      const broker = await room.broker()
      await broker.publish({ data: bytes('later') })
      const seen: { deliveries: number; at: number }[] = []
      broker.take(1, async (delivery) => {
        seen.push({ deliveries: delivery.deliveries, at: performance.now() })
        if (seen.length === 1) delivery.putBack(700)
        else delivery.ack()
      })
      await eventually(() => seen.length === 2 || undefined, 'the second delivery')
      expect(seen[1]?.deliveries).toBe(2)
      expect((seen[1]?.at ?? 0) - (seen[0]?.at ?? 0)).toBeGreaterThan(650)
    })

    it('that takes long is not redelivered to others, nor are those that wait behind it', async () => {
      const ackWaitMs = 300
      const [slow, other] = [await room.broker({ ackWaitMs }), await room.broker({ ackWaitMs })]
      await publishAll(slow, 2)
      const finish = signal()
      const counts: number[] = []
      slow.take(1, async (delivery) => {
        await finish.promise
        counts.push(delivery.deliveries)
        delivery.ack()
      })
      await eventually(async () => (await slow.backlog())?.ackPending === 2 || undefined, 'both to be taken')
      const { texts } = collect(other)
      const start = performance.now()
      // Several ack waits, as the broker's own clock has them: each is a message that comes and goes.
      for (let i = 0; performance.now() - start < 4 * ackWaitMs; i += 1) {
        await other.publish({ data: bytes(`tick ${i}`) })
        await eventually(() => texts.includes(`tick ${i}`) || undefined, 'a tick')
      }
      finish.fire()
      await eventually(() => counts.length === 2 || undefined, 'both to be done')
      expect(counts).toEqual([1, 1])
      expect(texts.filter((text) => text.startsWith('message'))).toEqual([])
    })

    it('whose work fails is logged, and redelivered', async () => {
      const broker = await room.broker()
      await broker.publish({ data: bytes('fails once') })
      const counts: number[] = []
      broker.take(1, async (delivery) => {
        counts.push(delivery.deliveries)
        if (counts.length === 1) throw new Error('not today')
        delivery.ack()
      })
      await eventually(() => counts.length === 2 || undefined, 'the second delivery')
      expect(counts).toEqual([1, 2])
      expect(room.logged.filter(({ level }) => level === 'error')).toHaveLength(1)
    })

    it('is ended once: later calls change nothing', async () => {
      const broker = await room.broker()
      await broker.publish({ data: bytes('once') })
      const ended = signal<Delivery>()
      broker.take(1, async (delivery) => {
        delivery.ack()
        delivery.putBack(0)
        await broker.bury(delivery, why)
        ended.fire(delivery)
      })
      await ended.promise
      await eventually(async () => ((await room.stored()) === 0 ? true : undefined), 'the ack')
      expect(await broker.deadLetters.list(10, null)).toEqual([])
      expect(await broker.backlog()).toMatchObject({ delivered: 1, pending: 0, ackPending: 0 })
    })
  })

  describe('dead letters', () => {
    const buryAll = (broker: RouterBroker) => broker.take(1, (delivery) => broker.bury(delivery, why))

    it('are complete, with their reason, and removed from the stream', async () => {
      const broker = await room.broker()
      const before = Date.now()
      await broker.publish({ data: bytes('whole'), id: 'the-id', headers: { 'X-Tenant': 'acme' } })
      buryAll(broker)
      const dead = await eventually(async () => (await broker.deadLetters.list(10, null))[0], 'the dead letter')
      expect(textOf(dead.data)).toBe('whole')
      expect(dead.headers).toEqual({ 'X-Tenant': 'acme', 'Nats-Msg-Id': 'the-id' })
      expect(dead).toMatchObject({ id: '1', reason: 'broken', detail: 'line one line two', deliveries: 1 })
      expect(dead.diedAt.getTime()).toBeGreaterThanOrEqual(before)
      await eventually(async () => ((await room.stored()) === 0 ? true : undefined), 'the ack')
    })

    it('are listed in pages', async () => {
      const broker = await room.broker()
      for (const text of ['a', 'b', 'c']) await broker.publish({ data: bytes(text) })
      buryAll(broker)
      await eventually(async () => ((await room.stored()) === 0 ? true : undefined), 'all to be buried')
      const first = await broker.deadLetters.list(2, null)
      const second = await broker.deadLetters.list(2, first[1]?.id ?? null)
      expect([...first, ...second].map(({ data }) => textOf(data))).toEqual(['a', 'b', 'c'])
    })

    it('are redriven oldest first, as new messages without a waiting caller and without a deadline', async () => {
      const broker = await room.broker()
      for (const text of ['a', 'b', 'c']) {
        await broker.publish({ data: bytes(text), id: text, headers: { 'X-Tenant': 'acme' }, deadlineMs: 1 })
      }
      const burying = buryAll(broker)
      await eventually(async () => ((await room.stored()) === 0 ? true : undefined), 'all to be buried')
      await burying.stop()
      expect(await broker.deadLetters.redrive(['3', '1', '99', 'nonsense'])).toEqual({ moved: 2, skipped: 2 })
      expect((await broker.deadLetters.list(10, null)).map(({ id }) => id)).toEqual(['2'])
      const again: (string | number | undefined)[][] = []
      broker.take(1, async (delivery) => {
        const { deliveries } = delivery
        const [tenant, deadline, reason] = ['X-Tenant', 'Spillway-Deadline', 'Spillway-Dead-Reason'].map((name) =>
          delivery.header(name),
        )
        again.push([textOf(delivery.data), deliveries, tenant, deadline, reason])
        delivery.ack()
      })
      await eventually(() => again.length === 2 || undefined, 'both to come again')
      expect(again).toEqual([
        ['a', 1, 'acme', undefined, undefined],
        ['c', 1, 'acme', undefined, undefined],
      ])
    })

    it('that do not fit any more are skipped with the reason, and the others are redriven', async () => {
      const broker = await room.broker()
      const nc = await room.nc()
      const large = new Uint8Array(broker.payloadBytesMax ?? 0)
      await jetstream(nc).publish(room.subject, large)
      await broker.publish({ data: bytes('small') })
      const burying = buryAll(broker)
      await eventually(async () => ((await room.stored()) === 0 ? true : undefined), 'both to be buried')
      await burying.stop()
      const refused = [{ id: '1', reason: 'too_large' }]
      expect(await broker.deadLetters.redrive(['1', '2'])).toEqual({ moved: 1, skipped: 1, refused })
      expect((await broker.deadLetters.list(10, null)).map(({ id }) => id)).toEqual(['1'])
    })

    it('show all values of a header that was repeated', async () => {
      const broker = await room.broker()
      const headers = newHeaders()
      for (const value of ['a', 'b']) headers.append('X-Via', value)
      await jetstream(await room.nc()).publish(room.subject, bytes('twice'), { headers })
      buryAll(broker)
      const dead = await eventually(async () => (await broker.deadLetters.list(1, null))[0], 'the dead letter')
      expect(dead.headers).toEqual({ 'X-Via': 'a, b' })
    })

    it('can die again after a redrive', async () => {
      const broker = await room.broker()
      await broker.publish({ data: bytes('unlucky'), id: 'x' })
      buryAll(broker)
      await eventually(async () => (await broker.deadLetters.list(1, null))[0], 'the dead letter')
      await broker.deadLetters.redrive(['1'])
      const again = await eventually(async () => (await broker.deadLetters.list(1, '1'))[0], 'the second death')
      expect(textOf(again.data)).toBe('unlucky')
    })

    it('are purged', async () => {
      const broker = await room.broker()
      await publishAll(broker, 3)
      buryAll(broker)
      await eventually(async () => ((await room.stored()) === 0 ? true : undefined), 'all to be buried')
      expect(await broker.deadLetters.purge(['1', '3', '4'])).toBe(2)
      expect((await broker.deadLetters.list(10, null)).map(({ id }) => id)).toEqual(['2'])
    })
  })

  describe('exhausted messages', () => {
    it('are buried when the last router never says a word', async () => {
      const broker = await room.broker({ ackWaitMs: 300, maxDeliver: 2, exhaustedLookMs: 3_600_000 })
      await broker.publish({ data: bytes('deadly'), headers: { 'X-Tenant': 'acme' } })
      const counts: number[] = []
      broker.take(1, async (delivery) => {
        counts.push(delivery.deliveries)
      })
      const dead = await eventually(async () => (await broker.deadLetters.list(1, null))[0], 'the dead letter')
      expect(counts).toEqual([1, 2])
      expect(dead).toMatchObject({ reason: 'max_deliver', deliveries: 2, headers: { 'X-Tenant': 'acme' } })
      expect(textOf(dead.data)).toBe('deadly')
      await eventually(async () => ((await room.stored()) === 0 ? true : undefined), 'it to leave the stream')
    })

    it('are buried when the last router falls with the message in its hands', async () => {
      const options = { ackWaitMs: 300, maxDeliver: 1 }
      const [falls, lives] = [await room.broker(options), await room.broker(options)]
      await falls.publish({ data: bytes('deadly') })
      const taken = signal()
      falls.take(1, () => {
        taken.fire()
        return new Promise(() => undefined)
      })
      await taken.promise
      await falls.close()
      const { texts } = collect(lives)
      const dead = await eventually(async () => (await lives.deadLetters.list(1, null))[0], 'the dead letter')
      expect(dead.reason).toBe('max_deliver')
      expect(texts).toEqual([])
    })

    it('are buried when they are put back at the last delivery', async () => {
      const broker = await room.broker({ maxDeliver: 1 })
      await broker.publish({ data: bytes('deadly') })
      broker.take(1, async (delivery) => delivery.putBack(0))
      const dead = await eventually(async () => (await broker.deadLetters.list(1, null))[0], 'the dead letter')
      expect(dead).toMatchObject({ reason: 'max_deliver', deliveries: 1 })
    })

    const options = { ackWaitMs: 200, maxDeliver: 1 }

    /** Nobody is connected who would listen. */
    const exhaustUnheard = async (count: number): Promise<void> => {
      const maker = await room.broker(options)
      await publishAll(maker, count)
      await maker.close()
      const consumer = await jetstream(await room.nc()).consumers.get(await streamOf(room), maker.consumer)
      // The first request takes them; the second makes the broker notice that they may not be handed out again.
      for await (const message of await consumer.fetch({ max_messages: count, expires: 1_000 })) void message
      for await (const message of await consumer.fetch({ max_messages: 1, expires: 1_000 })) void message
      expect((await consumer.info()).num_ack_pending).toBe(0)
    }

    it('are found by counting when no notification arrived', async () => {
      await exhaustUnheard(3)
      const broker = await room.broker({ ...options, exhaustedLookMs: 100 })
      await eventually(async () => ((await room.stored()) === 0 ? true : undefined), 'the stream to be empty')
      const dead = await broker.deadLetters.list(10, null)
      expect(dead.map(({ data }) => textOf(data)).sort()).toEqual(['message 0', 'message 1', 'message 2'])
      expect(dead.map(({ reason }) => reason)).toEqual(['max_deliver', 'max_deliver', 'max_deliver'])
    })

    it('are buried at last when that fails at first, however busy the rest is', async () => {
      const broker = await room.broker({ ...options, exhaustedLookMs: 50 })
      const taken = signal()
      broker.take(2, (delivery) => {
        taken.fire()
        return textOf(delivery.data) === 'held' ? new Promise(() => undefined) : Promise.resolve()
      })
      await broker.publish({ data: bytes('held') })
      await taken.promise
      await (await room.jsm()).streams.delete(`${await streamOf(room)}_DLQ`)
      await broker.publish({ data: bytes('deadly') })
      const look = () => broker.deadLetters.list(1, null).catch(() => [])
      const dead = await eventually(async () => (await look())[0], 'the dead letter')
      expect(textOf(dead.data)).toBe('deadly')
      expect(room.logged.some(({ message }) => message.includes('could not dead-letter'))).toBe(true)
    })

    it('are distinguished from messages that are being processed', async () => {
      await exhaustUnheard(1)
      const jsm = await room.jsm()
      await jsm.consumers.update(await streamOf(room), 'spillway-router', { max_deliver: 3 })
      const broker = await room.broker({ ackWaitMs: 30_000, maxDeliver: 3, exhaustedLookMs: 20 })
      const [taken, finish] = [signal(), signal()]
      broker.take(4, async (delivery) => {
        if (textOf(delivery.data) === 'held') {
          taken.fire()
          await finish.promise
        }
        delivery.ack()
      })
      await broker.publish({ data: bytes('held') })
      await taken.promise
      // Each takes longer than nothing: all together there are many looks.
      for (let i = 0; i < 100; i += 1) await broker.publish({ data: bytes(`${i}`) })
      expect(await broker.deadLetters.list(10, null)).toEqual([])
      finish.fire()
      await eventually(async () => ((await room.stored()) === 0 ? true : undefined), 'the stream to be empty')
      expect((await broker.deadLetters.list(10, null)).map(({ data }) => textOf(data))).toEqual(['message 0'])
    })

    it('are distinguished from messages that were never delivered', async () => {
      await exhaustUnheard(1)
      const broker = await room.broker({ ...options, exhaustedLookMs: 20 })
      for (let i = 0; i < 100; i += 1) await broker.publish({ data: bytes('waits for a router') })
      await eventually(async () => (await broker.deadLetters.list(1, null))[0], 'the exhausted one to be buried')
      await eventually(async () => ((await room.stored()) === 100 ? true : undefined), 'it to leave the stream')
      expect((await broker.deadLetters.list(10, null)).map(({ data }) => textOf(data))).toEqual(['message 0'])
      expect(await broker.backlog()).toMatchObject({ pending: 100 })
    })

    it('are not seen where there are none, however often one looks', async () => {
      const broker = await room.broker({ exhaustedLookMs: 5 })
      const { texts } = collect(broker, 8)
      for (let round = 0; round < 40; round += 1) {
        await publishAll(broker, 25)
        await eventually(() => texts.length >= (round + 1) * 25 || undefined, 'the round to be done')
      }
      expect(texts).toHaveLength(1_000)
      expect(await broker.deadLetters.list(10, null)).toEqual([])
    })
  })
})
