import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { type HalfOpenProxy, startHalfOpenProxy } from '../../../spillway/test/half-open-proxy.js'
import { eventually, signal } from '../../../spillway/test/pipeline-fixture.js'
import { findNats, freePort, type NatsServer, startNats } from '../../../spillway/test/setup/nats.js'
import type { RouterBroker } from '../../src/brokers/nats/broker.js'
import type { Delivery } from '../../src/brokers/nats/delivery.js'
import { BrokerFault } from '../../src/brokers/nats/faults.js'
import { bytes, collect, connected, openRoom, type Room, streamOf, textOf } from '../brokers-nats-fixture.js'

const found = await findNats()

const answering = (router: RouterBroker) =>
  router.take(8, async (delivery) => {
    router.answer(delivery, bytes(`re: ${textOf(delivery.data)}`))
    delivery.ack()
  })

const lost = (broker: RouterBroker) => eventually(() => !broker.isConnected || undefined, 'the loss to be seen')

describe.skipIf('missing' in found)('JetStream that fails', () => {
  let server: NatsServer
  let room: Room

  beforeEach(async () => {
    server = await startNats()
    room = openRoom(server.url)
  })
  afterEach(async () => {
    await room.close()
    await server.stop()
  })

  it('refuses messages and requests while it is away, and serves again when it is back', async () => {
    const broker = await room.broker()
    const { texts } = collect(broker)
    await server.kill()
    await lost(broker)
    await expect(broker.publish({ data: bytes('a') })).rejects.toMatchObject({ code: 'unavailable' })
    await expect(broker.ask({ data: bytes('a') }, 1_000)).rejects.toMatchObject({ code: 'unavailable' })
    await expect(broker.deadLetters.list(1, null)).rejects.toMatchObject({ code: 'unavailable' })
    expect(await broker.backlog()).toBeNull()
    await server.restart()
    await connected(broker)
    await broker.publish({ data: bytes('back') })
    await eventually(() => texts.includes('back') || undefined, 'the message after the restart')
  })

  it('loses nothing that it has acked, however often it is killed', async () => {
    const [publisher, router] = [await room.broker(), await room.broker({ ackWaitMs: 1_000 })]
    const taken = new Set<string>()
    router.take(8, async (delivery) => {
      taken.add(textOf(delivery.data))
      delivery.ack()
    })
    const acked: string[] = []
    let publishing = true
    const published = (async () => {
      for (let i = 0; publishing; i += 1) {
        const stored = await publisher.publish({ data: bytes(`${i}`), id: `${i}` }).catch(() => null)
        if (stored !== null) acked.push(`${i}`)
        else await eventually(() => publisher.isConnected || undefined, 'the broker to be back')
      }
    })()
    for (let kills = 1; kills <= 3; kills += 1) {
      const before = acked.length
      await eventually(() => acked.length > before + 200 || undefined, 'more to be published')
      await server.restart()
    }
    const before = acked.length
    await eventually(() => acked.length > before + 200 || undefined, 'publishing after the last restart')
    publishing = false
    await published
    await eventually(async () => ((await room.stored()) === 0 ? true : undefined), 'the stream to be empty')
    expect(acked.filter((text) => !taken.has(text))).toEqual([])
  })

  it('answers requests from before it became unreachable', async () => {
    const [gateway, router] = [await room.broker(), await room.broker()]
    const [taken, finish] = [signal(), signal()]
    router.take(1, async (delivery) => {
      taken.fire()
      await finish.promise
      router.answer(delivery, bytes('late, but here'))
      delivery.ack()
    })
    const asked = gateway.ask({ data: bytes('?') }, 20_000)
    await taken.promise
    await server.restart()
    await connected(router)
    finish.fire()
    expect(textOf(await asked)).toBe('late, but here')
  })

  it('gets answers and acks from its time away: nothing is processed twice', async () => {
    const [gateway, router] = [await room.broker(), await room.broker()]
    const [taken, finish, done] = [signal(), signal(), signal()]
    let works = 0
    router.take(1, async (delivery) => {
      works += 1
      taken.fire()
      await finish.promise
      router.answer(delivery, bytes('done meanwhile'))
      delivery.ack()
      done.fire()
    })
    const asked = gateway.ask({ data: bytes('?') }, 20_000)
    await taken.promise
    await server.kill()
    await Promise.all([lost(router), lost(gateway)])
    finish.fire()
    await done.promise
    await server.restart()
    expect(textOf(await asked)).toBe('done meanwhile')
    await eventually(async () => ((await room.stored()) === 0 ? true : undefined), 'the ack to count')
    expect(works).toBe(1)
  })

  it('gets messages again, once, that were in flight when it went down', async () => {
    const broker = await room.broker()
    const before = Array.from({ length: 100 }, (_, i) => broker.publish({ data: bytes(`${i}`), id: `${i}` }))
    const restarted = server.restart()
    const outcomes = await Promise.allSettled(before)
    await restarted
    expect(outcomes.filter(({ status }) => status === 'rejected')).toEqual([])
    expect(await room.stored()).toBe(100)
  })

  it('answers all that it took in, however often it is killed', async () => {
    const [gateway, router] = [await room.broker(), await room.broker({ ackWaitMs: 1_000 })]
    answering(router)
    let asking = true
    let answered = 0
    const faults: unknown[] = []
    const ask = async (name: number) => {
      for (let i = 0; asking; i += 1) {
        const question = `${name}.${i}`
        try {
          expect(textOf(await gateway.ask({ data: bytes(question) }, 20_000))).toBe(`re: ${question}`)
          answered += 1
        } catch (error) {
          // Refused before it was sent, as it must be while the broker is away; anything else is a fault.
          if (!(error instanceof BrokerFault && error.code === 'unavailable')) faults.push(error)
          await eventually(() => gateway.isConnected || undefined, 'the broker to be back')
        }
      }
    }
    const asked = Promise.all(Array.from({ length: 16 }, (_, name) => ask(name)))
    for (let kills = 1; kills <= 4; kills += 1) {
      const before = answered
      await eventually(() => answered > before + 300 || undefined, 'more to be answered')
      await server.restart()
    }
    asking = false
    await asked
    expect(faults).toEqual([])
  })

  it('is taken from again when somebody has deleted the consumer', async () => {
    const broker = await room.broker()
    const { texts } = collect(broker)
    const jsm = await room.jsm()
    const stream = await streamOf(room)
    await jsm.consumers.delete(stream, broker.consumer)
    await broker.publish({ data: bytes('after') })
    await eventually(() => texts.includes('after') || undefined, 'the message', 20_000)
    expect((await jsm.consumers.info(stream, broker.consumer)).config.max_deliver).toBe(3)
  })

  it('is taken from again when somebody has deleted the stream', async () => {
    const broker = await room.broker()
    const { texts } = collect(broker)
    await broker.publish({ data: bytes('before') })
    await eventually(() => texts.length === 1 || undefined, 'the first message')
    await (await room.jsm()).streams.delete(await streamOf(room))
    const publish = () =>
      broker.publish({ data: bytes('after') }).then(
        () => true,
        () => undefined,
      )
    await eventually(publish, 'the stream to be there again')
    await eventually(() => texts.includes('after') || undefined, 'the message', 20_000)
  })

  describe('behind a network that fails', () => {
    let proxy: HalfOpenProxy
    let behind: Room

    beforeEach(async () => {
      proxy = await startHalfOpenProxy({ host: '127.0.0.1', port: server.port })
      behind = openRoom(`nats://127.0.0.1:${proxy.port}`)
    })
    afterEach(async () => {
      await behind.close()
      await proxy.close()
    })

    it('is noticed when it falls silent without closing', async () => {
      const broker = await behind.broker()
      proxy.stall()
      await expect(broker.publish({ data: bytes('a') })).rejects.toMatchObject({ code: 'timeout' })
      await eventually(() => !broker.isConnected || undefined, 'the silence to be noticed', 20_000)
      proxy.resumeNew()
      await connected(broker, 15_000)
    })

    it('is given an answer again that was lost with the connection', async () => {
      const router = await behind.broker({ subject: room.subject })
      const gateway = await room.broker()
      const [taken, finish, done] = [signal(), signal(), signal()]
      router.take(1, async (delivery) => {
        taken.fire()
        await finish.promise
        router.answer(delivery, bytes('lost, then found'))
        done.fire()
      })
      const asked = gateway.ask({ data: bytes('?') }, 10_000)
      await taken.promise
      proxy.stall()
      finish.fire()
      await done.promise
      await proxy.pass()
      expect(textOf(await asked)).toBe('lost, then found')
    })

    it('redelivers a message to the router that still has it: it is processed once', async () => {
      // Longer than this process may be held up: what is late with its ack is handed out once more, and rightly so.
      const ackWaitMs = 1_000
      const router = await behind.broker({ subject: room.subject, ackWaitMs })
      const watcher = await room.broker({ ackWaitMs })
      const finish = signal()
      const taken: Delivery[] = []
      router.take(2, async (delivery) => {
        taken.push(delivery)
        await finish.promise
        delivery.ack()
      })
      await watcher.publish({ data: bytes('long') })
      const held = await eventually(() => taken[0], 'it to be taken')
      await proxy.refuse()
      const refusedAt = performance.now()
      await eventually(() => performance.now() > refusedAt + 2 * ackWaitMs || undefined, 'the ack wait to be over')
      await proxy.pass()
      // Here, not only at the broker: one that is still on its way when the work ends is a new one for the router.
      await eventually(() => held.deliveries > 1 || undefined, 'it to be handed out again')
      finish.fire()
      await eventually(async () => ((await room.stored()) === 0 ? true : undefined), 'its ack')
      expect(taken).toEqual([held])
    })

    it('hands a message again whose ack is late: it is acked again, and worked on once', async () => {
      const ackWaitMs = 300
      const router = await behind.broker({ subject: room.subject, ackWaitMs })
      const watcher = await room.broker({ ackWaitMs })
      const finish = signal()
      const taken: Delivery[] = []
      router.take(2, async (delivery) => {
        taken.push(delivery)
        await finish.promise
        delivery.ack()
      })
      await watcher.publish({ data: bytes('long') })
      const held = await eventually(() => taken[0], 'it to be taken')
      await proxy.refuse()
      await lost(router)
      finish.fire()
      const refusedAt = performance.now()
      await eventually(() => performance.now() > refusedAt + 2 * ackWaitMs || undefined, 'the ack wait to be over')
      await proxy.pass()
      await eventually(async () => ((await room.stored()) === 0 ? true : undefined), 'its ack')
      // What was handed out after all would be here before the next one.
      await watcher.publish({ data: bytes('next') })
      await eventually(() => taken.find(({ data }) => textOf(data) === 'next'), 'the next one')
      expect(taken.filter(({ data }) => textOf(data) === 'long')).toEqual([held])
    })
  })

  it('is waited for when it is absent at the start', async () => {
    const port = await freePort()
    const early = openRoom(`nats://127.0.0.1:${port}`)
    const broker = await early.broker({ wait: false })
    const { texts } = collect(broker)
    await broker.limitAckPending(7)
    await expect(broker.publish({ data: bytes('a') })).rejects.toMatchObject({ code: 'unavailable' })
    expect([broker.isConnected, broker.payloadBytesMax]).toEqual([false, null])
    await eventually(() => early.logged[0], 'a word in the log')
    const late = await startNats({ port })
    try {
      await connected(broker)
      await broker.publish({ data: bytes('at last') })
      await eventually(() => texts[0], 'the message')
      const { config } = await (await early.jsm()).consumers.info(await streamOf(early), broker.consumer)
      expect(config.max_ack_pending).toBe(7)
    } finally {
      await early.close()
      await late.stop()
    }
  })

  it('is no fault when it has no JetStream: it is waited for', async () => {
    const plain = await startNats({ jetstream: false })
    const without = openRoom(plain.url)
    try {
      const broker = await without.broker({ wait: false })
      const said = () => without.logged.find(({ message }) => message.includes('streams'))
      const { fields } = await eventually(said, 'a word in the log')
      expect(String((fields as { err?: unknown }).err)).toContain('no JetStream')
      expect(broker.isConnected).toBe(false)
      expect(broker.trouble).toContain('no JetStream')
      await expect(broker.publish({ data: bytes('a') })).rejects.toMatchObject({ code: 'unavailable' })
    } finally {
      await without.close()
      await plain.stop()
    }
  })

  it('can be closed while it is absent', async () => {
    const nowhere = openRoom(`nats://127.0.0.1:${await freePort()}`)
    const broker = await nowhere.broker({ wait: false })
    await eventually(() => nowhere.logged[0], 'the first attempt to fail')
    await broker.close()
    await expect(broker.publish({ data: bytes('a') })).rejects.toMatchObject({ code: 'unavailable' })
  })

  it('fails waiting calls when it is closed', async () => {
    const broker = await room.broker()
    const asked = broker.ask({ data: bytes('?') }, 60_000)
    const failed = expect(asked).rejects.toMatchObject({ code: 'timeout' })
    await broker.close()
    await failed
  })
})
