/**
 * Notifies other processes of appends. Only a hint: nothing is kept for processes that are not listening.
 *
 *   deaf ──subscribed──► hearing   (all readers check everything: earlier notifications are lost)
 *     ▲                     │ lost
 *     └─────────────────────┘
 */
import { randomUUID } from 'node:crypto'
import type { Redis } from 'ioredis'
import { Link, type LinkOptions } from './link.js'

type Heard = (ids: readonly string[] | null) => void

export interface BellOptions extends Omit<LinkOptions, 'prepare' | 'onReady'> {
  channel: string
}

export class Bell {
  /** Prefix of each message, so that a process ignores its own. */
  readonly #self = randomUUID()
  readonly #heard: Heard[] = []
  readonly #link: Link

  constructor({ channel, ...options }: BellOptions) {
    this.#link = new Link({
      ...options,
      prepare: async (redis) => {
        // May run again on the same connection if the first try was refused.
        redis.removeAllListeners('message')
        redis.on('message', (_: string, message: string) => this.#hear(message))
        await redis.subscribe(channel)
      },
      onReady: () => this.#notify(null),
    })
  }

  onBell(heard: Heard): void {
    this.#heard.push(heard)
  }

  ring(redis: Redis, channel: string, ids: readonly string[]): Promise<unknown> {
    return redis.publish(channel, [this.#self, ...ids].join(' '))
  }

  close(): Promise<void> {
    return this.#link.close()
  }

  #hear(message: string): void {
    const [from, ...ids] = message.split(' ')
    if (from !== this.#self && ids.length > 0) this.#notify(ids)
  }

  #notify(ids: readonly string[] | null): void {
    for (const heard of this.#heard) heard(ids)
  }
}
