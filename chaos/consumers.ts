/**
 * Those who read the messages: some in each group, each asks whichever server for messages, and answers for them. Not all of
 * them are good at it: some leave while they wait, some forget what they were given, some answer when their time is over, some
 * fail, answer in parts, or twice.
 */
import { setMaxListeners } from 'node:events'
import { setTimeout as delay } from 'node:timers/promises'
import { Agent } from 'undici'
import { type Message, messagesOf } from './answer-body.js'
import { call, callAndRecord } from './call.js'
import { pause } from './clock.js'
import { type Chance, chance } from './random.js'
import type { Ack, Pop } from './records.js'
import type { Slot } from './slot.js'
import { queueName } from './workload.js'

export const consumerGroups = ['archive', 'mail'] as const
/** How long a delivery is theirs: shorter than usual, so that those who forget are seen. Whole seconds. */
export const consumerLeaseMs = 3_000
const consumersPerGroup = 3
const batchMax = 8
const partitionsMax = 3
const pollMsMin = 300
const pollMsMax = 3_000
const workMsMax = 30
const againMs = 40
/** So often an answer is sent that was not heard. */
const ackTriesMax = 4
const lateByMs = 200

export interface ConsumersOptions {
  seed: number
  slots: readonly Slot[]
  deadlineMs: number
  note(kind: 'pop' | 'ack', entry: Pop | Ack): void
}

interface Habits {
  leaves: boolean
  forgets: boolean
  isLate: boolean
  inParts: boolean
  twice: boolean
}

export class Consumers {
  readonly pops: Pop[] = []
  readonly acks: Ack[] = []
  readonly #o: ConsumersOptions
  readonly #agent = new Agent({ connections: 16, pipelining: 1, connect: { timeout: 2_000 } })
  readonly #closing = new AbortController()
  readonly #all: Promise<void>[]
  #isCalm = false

  /** They begin at once. */
  constructor(options: ConsumersOptions) {
    this.#o = options
    // Every consumer waits on it.
    setMaxListeners(0, this.#closing.signal)
    this.#all = consumerGroups.flatMap((group) =>
      Array.from({ length: consumersPerGroup }, (_, i) => this.#consume(group, `${group}-${i + 1}`)),
    )
  }

  /** From here on they do as they should: what is left is to be read soon. */
  calm(): void {
    this.#isCalm = true
  }

  async close(): Promise<void> {
    this.#closing.abort()
    await this.#agent.destroy()
    await Promise.all(this.#all)
  }

  async #consume(group: string, consumer: string): Promise<void> {
    const luck = chance(this.#o.seed, `consumer ${consumer}`)
    const { signal } = this.#closing
    while (!signal.aborted) {
      const habits = this.#habits(luck)
      const messages = await this.#pop(group, consumer, habits, luck)
      if (messages === null) await pause(againMs * (0.5 + luck.next()), signal)
      else if (messages.length > 0 && !habits.forgets) {
        await pause(habits.isLate ? consumerLeaseMs + lateByMs : luck.between(0, workMsMax), signal)
        await this.#answer(group, consumer, messages, habits, luck)
      }
    }
  }

  /** All are drawn, needed or not, so that one choice does not shift the others. */
  #habits(luck: Chance): Habits {
    const [leaves, forgets, isLate, inParts, twice] = [0.04, 0.04, 0.02, 0.2, 0.05].map((share) => luck.happens(share))
    const isCalm = this.#isCalm
    return {
      leaves: leaves === true && !isCalm,
      forgets: forgets === true && !isCalm,
      isLate: isLate === true && !isCalm,
      inParts: inParts === true,
      twice: twice === true,
    }
  }

  #slot(luck: Chance): Slot | null {
    const able = this.#o.slots.filter((slot) => slot.routes.has('push') && slot.origin !== null)
    return able.length === 0 ? null : luck.pick(able)
  }

  /** Null: nobody answered. */
  async #pop(group: string, consumer: string, { leaves }: Habits, luck: Chance): Promise<Message[] | null> {
    const slot = this.#slot(luck)
    const query = new URLSearchParams({
      consumerGroup: group,
      batch: String(luck.between(1, batchMax)),
      partitions: String(luck.between(1, partitionsMax)),
      wait: 'true',
      timeout: String(luck.between(pollMsMin, pollMsMax)),
    })
    const leavesAfterMs = luck.between(1, pollMsMin)
    if (slot === null) return null
    const path = `/api/v1/pop/queue/${queueName}?${query}`
    const made = await callAndRecord(
      slot,
      { agent: this.#agent, method: 'GET', path },
      { deadlineMs: this.#o.deadlineMs, cutAfterMs: leaves ? leavesAfterMs : null },
    )
    // Ended by the run: what became of it says nothing.
    if (this.#closing.signal.aborted) return null
    const pop: Pop = { group, consumer, ...made }
    this.pops.push(pop)
    this.#o.note('pop', pop)
    if (pop.end === 'answered' && pop.status === 204) return []
    return pop.end === 'answered' && pop.status === 200 ? (messagesOf(pop.body) ?? []) : null
  }

  async #answer(
    group: string,
    consumer: string,
    messages: readonly Message[],
    { inParts, twice }: Habits,
    luck: Chance,
  ): Promise<void> {
    const asked = messages.map(({ transactionId, partitionId, leaseId }) => {
      const dice = luck.next()
      const fails = !this.#isCalm && dice < 0.07
      const status = !fails ? 'completed' : dice < 0.04 ? 'failed' : 'retry'
      return { transactionId, partitionId, leaseId, status } as const
    })
    const middle = inParts ? luck.between(0, asked.length - 1) : 0
    for (const part of [asked.slice(0, middle), asked.slice(middle)]) {
      if (part.length === 0) continue
      if (await this.#ack(group, consumer, part, luck)) {
        if (twice) await this.#ack(group, consumer, part, luck)
      }
    }
  }

  /** Whether it was answered. If not, it is sent again, to whichever server, as long as it can count. */
  async #ack(group: string, consumer: string, asked: Ack['asked'], luck: Chance): Promise<boolean> {
    for (let tries = 0; tries < ackTriesMax && !this.#closing.signal.aborted; tries++) {
      const slot = this.#slot(luck)
      if (slot !== null) {
        const body = {
          consumerGroup: group,
          acknowledgments: asked.map((one) => (one.status === 'failed' ? { ...one, error: 'chaos' } : one)),
        }
        const made = await callAndRecord(
          slot,
          { agent: this.#agent, method: 'POST', path: '/api/v1/ack/batch', body },
          { deadlineMs: this.#o.deadlineMs, cutAfterMs: null },
        )
        const ack: Ack = { group, consumer, asked, ...made }
        this.acks.push(ack)
        this.#o.note('ack', ack)
        if (ack.end === 'answered' && ack.status === 200) return true
      }
      await pause(againMs * (0.5 + luck.next()), this.#closing.signal)
    }
    return false
  }
}

/**
 * Before the first message: a short lease, and tries that never run out, so that everything is consumed in the end. False: no
 * slot takes messages.
 */
export async function configureQueue(slots: readonly Slot[], withinMs: number): Promise<boolean> {
  const slot = slots.find(({ routes }) => routes.has('push'))
  if (slot === undefined) return false
  const agent = new Agent()
  const options = { leaseTime: consumerLeaseMs / 1_000, retryLimit: 1_000, retryDelay: 20 }
  const signal = AbortSignal.timeout(withinMs)
  try {
    for (;;) {
      const request = { agent, method: 'POST', path: '/api/v1/configure', body: { queue: queueName, options } } as const
      const { status, body } = await call(slot, { ...request, signal })
      if (status === 201) return true
      // It listens before it has reached the store.
      if (status !== 503) throw new Error(`The queue could not be configured: ${status} ${JSON.stringify(body)}`)
      await delay(againMs, undefined, { signal })
    }
  } finally {
    await agent.close()
  }
}
