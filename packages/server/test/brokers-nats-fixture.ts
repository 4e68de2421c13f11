import { randomBytes } from 'node:crypto'
import { type JetStreamManager, jetstreamManager } from '@nats-io/jetstream'
import { connect, type NatsConnection } from '@nats-io/transport-node'
import { eventually, type Logged, loggingTo } from '../../spillway/test/pipeline-fixture.js'
import { type NatsBrokerOptions, RouterBroker } from '../src/brokers/nats/broker.js'
import type { Delivery } from '../src/brokers/nats/delivery.js'

/** A subject of its own on a server that others may share, its brokers, and a plain connection to look with. */
export interface Room {
  subject: string
  logged: Logged[]
  /** Connected, unless `wait` is false. */
  broker(options?: Partial<NatsBrokerOptions> & { wait?: boolean }): Promise<RouterBroker>
  /** As a stranger. */
  nc(): Promise<NatsConnection>
  jsm(): Promise<JetStreamManager>
  /** What lies in the stream. */
  stored(): Promise<number>
  close(): Promise<void>
}

export function openRoom(url: string): Room {
  const suffix = randomBytes(6).toString('hex')
  const subject = `test.${suffix}`
  const logged: Logged[] = []
  const brokers: RouterBroker[] = []
  let plain: Promise<NatsConnection> | null = null
  const nc = (): Promise<NatsConnection> => {
    plain ??= connect({ servers: [new URL(url).host], maxReconnectAttempts: -1, reconnectTimeWait: 50 })
    return plain
  }
  const jsm = async (): Promise<JetStreamManager> => jetstreamManager(await nc(), { checkAPI: false })
  const room: Room = {
    subject,
    logged,
    broker: async ({ wait = true, ...options } = {}) => {
      const broker = new RouterBroker({ url, subject, maxDeliver: 3, log: loggingTo(logged), ...options })
      brokers.push(broker)
      if (wait) await connected(broker)
      return broker
    },
    nc,
    jsm,
    stored: async () => (await (await jsm()).streams.info(await streamOf(room))).state.messages,
    close: async () => {
      await Promise.all(brokers.map((broker) => broker.close()))
      if (plain !== null) await (await plain).close()
    },
  }
  return room
}

/** The name of the stream that has the room's subject. */
export async function streamOf(room: Room): Promise<string> {
  return (await room.jsm()).streams.find(room.subject)
}

export async function connected(broker: RouterBroker, ms?: number): Promise<void> {
  await eventually(() => broker.isConnected || undefined, 'the broker to be connected', ms)
}

export const bytes = (text: string): Uint8Array => new TextEncoder().encode(text)
export const textOf = (data: Uint8Array): string => new TextDecoder().decode(data)

/** Acks all it gets, and notes it. */
export function collect(broker: RouterBroker, atOnce = 16): { texts: string[]; stop(): Promise<void> } {
  const texts: string[] = []
  const taking = broker.take(atOnce, async (delivery: Delivery) => {
    texts.push(textOf(delivery.data))
    delivery.ack()
  })
  return { texts, stop: taking.stop }
}
