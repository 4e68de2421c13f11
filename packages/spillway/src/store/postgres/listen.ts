import pg from 'pg'
import { periodic } from '../../time/periodic.js'
import { toStoreFault } from './faults.js'
import type { Log } from './options.js'
import { type Origin, originOf } from './origin.js'

const reconnectDelayMs = 500
const pollMs = 1_000

export interface Listener {
  started: Promise<void>
  close(): Promise<void>
}

export interface ListenOptions {
  url: string | Origin
  channel: string
  onNotice(payload: string): void
  /** It listens again after a loss: notifications sent in between were missed. */
  onGap(): void
  log: Log
}

/** A connection for LISTEN that reconnects by itself. The pulse finds what it misses. */
export function listenOn({ url, channel, onNotice, onGap, log }: ListenOptions): Listener {
  let closed = false
  let client: pg.Client | undefined
  let timer: NodeJS.Timeout | undefined
  let missed = false
  const connect = async (): Promise<void> => {
    const next = originOf(url).client({
      application_name: 'spillway listen',
      keepAlive: true,
      connectionTimeoutMillis: 2_000,
    })
    let lost = false
    const lose = (error?: unknown): void => {
      if (lost || closed) return
      lost = true
      missed = true
      log.warn({ err: error === undefined ? undefined : toStoreFault(error) }, 'the wake-up connection was lost')
      timer = setTimeout(() => void connect().catch(lose), reconnectDelayMs)
      timer.unref()
    }
    next.on('error', lose)
    next.on('end', () => lose())
    next.on('notification', (message) => onNotice(message.payload ?? ''))
    client = next
    try {
      await next.connect()
      await next.query(`LISTEN ${pg.escapeIdentifier(channel)}`)
    } catch (error) {
      lose(error)
      return
    }
    if (missed && !lost && !closed) {
      missed = false
      onGap()
    }
  }
  return {
    started: connect(),
    close: async () => {
      closed = true
      clearTimeout(timer)
      await client?.end().catch(() => undefined)
    },
  }
}

/** If listening is not possible, something may be missed each second. */
export function pollInstead(onGap: () => void): Listener {
  const polling = periodic(pollMs, onGap)
  return { started: Promise.resolve(), close: () => polling.stop() }
}
