/** Connections that end, fall silent or are left behind at the worst moment: in the middle of a handler's transaction. */
import { once } from 'node:events'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import type { Tx } from '../../src/index.js'
import { postgres } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import type { OpenTx, Store } from '../../src/store/port.js'
import { addressOf, type HalfOpenProxy, startHalfOpenProxy, through } from '../half-open-proxy.js'
import { type Bench, bench, eventually, overriding, signal } from '../pipeline-fixture.js'

const Body = Type.Object({ lane: Type.String(), n: Type.Integer() })
const lane = (body: { lane: string }) => ['q', body.lane] as const
const timeoutMs = 1_000
/** What the database allows beyond the operation's timeout. */
const graceMs = 2_000
/** Of a handler's timeout, of the wait for its transaction to be taken back, and a busy machine's. */
const letGoMsMax = timeoutMs + 1_000 + 3_000
const usual = { body: Body, lane, timeoutMs, maxRetries: 20 }

let b: Bench
const proxies: { close(): Promise<void> }[] = []
beforeEach(async () => {
  b = await bench()
  await b.sql('CREATE TABLE effects (at bigserial, lane text, n int)')
})
afterEach(async () => {
  // First: a store that waits for silent connections hears of their end.
  for (const proxy of proxies.splice(0)) await proxy.close()
  await b.close()
})

const idOf = (answer: { kind: string; operationId?: string }): string => {
  if (answer.operationId === undefined) throw new Error(`expected an operation, not ${answer.kind}`)
  return answer.operationId
}
const write = (tx: Tx, body: { lane: string; n: number }) =>
  tx.query('INSERT INTO effects (lane, n) VALUES ($1, $2)', [body.lane, body.n])
const effects = async (): Promise<number[]> =>
  (await b.sql<{ n: number }>('SELECT n FROM effects ORDER BY at')).map((row) => row.n)

async function halfOpen(): Promise<HalfOpenProxy> {
  const proxy = await startHalfOpenProxy(addressOf(b.url))
  proxies.push(proxy)
  return proxy
}

/** Ends the server's side of a transaction's connection; resolves when this side must have heard of it. */
async function terminateBackendOf(tx: Tx): Promise<void> {
  const { rows } = await tx.query<{ pid: number }>('SELECT pg_backend_pid() AS pid')
  const pid = rows[0]?.pid
  await b.sql('SELECT pg_terminate_backend($1)', [pid])
  // Its last message is sent before it is gone, and each look here is a turn of the event loop after that.
  await eventually(
    async () => ((await b.sql('SELECT FROM pg_stat_activity WHERE pid = $1', [pid])).length === 0 ? true : undefined),
    'the backend to end',
  )
  await b.sql('SELECT 1')
}

/** What would have ended the process. */
function watchForTheEnd(): { readonly faults: unknown[]; stop(): void } {
  const faults: unknown[] = []
  const note = (fault: unknown): void => void faults.push(fault)
  process.on('uncaughtExceptionMonitor', note)
  return { faults, stop: () => void process.off('uncaughtExceptionMonitor', note) }
}

describe('a connection that is lost between two statements', () => {
  let end: ReturnType<typeof watchForTheEnd>
  beforeEach(() => {
    end = watchForTheEnd()
  })
  afterEach(() => end.stop())

  it('of ctx.tx: the process lives, the operation is retried and takes effect once', async () => {
    const intake = await b.intake()
    const failed = signal<unknown>()
    const op = intake.define('op', {
      ...usual,
      timeoutMs: 10_000,
      run: async (body, ctx) => {
        await write(ctx.tx, body)
        if (ctx.attempt === 1) {
          await terminateBackendOf(ctx.tx)
          await ctx.tx.query('SELECT 1').catch((fault: unknown) => {
            failed.fire(fault)
            throw fault
          })
        }
        return ctx.attempt
      },
    })
    expect(await intake.submit(op, { lane: 'a', n: 1 }, { waitMs: 10_000 })).toMatchObject({ kind: 'done', result: 2 })
    expect(await failed.promise).toMatchObject({ name: 'StoreFault', code: 'unavailable' })
    expect(await effects()).toEqual([1])
    expect(end.faults).toEqual([])
    expect(await b.audit()).toEqual([])
  })

  it('of ctx.tx, and the handler returns without another: nothing was committed, so it is retried', async () => {
    const intake = await b.intake()
    const op = intake.define('op', {
      ...usual,
      timeoutMs: 10_000,
      run: async (body, ctx) => {
        await write(ctx.tx, body)
        if (ctx.attempt === 1) await terminateBackendOf(ctx.tx)
        return ctx.attempt
      },
    })
    expect(await intake.submit(op, { lane: 'a', n: 1 }, { waitMs: 10_000 })).toMatchObject({ kind: 'done', result: 2 })
    expect(await effects()).toEqual([1])
    expect(end.faults).toEqual([])
    expect(await b.audit()).toEqual([])
  })

  it('of an apply: the caller learns that nothing was accepted, and may try again', async () => {
    const intake = await b.intake()
    let calls = 0
    const op = intake.define('op', {
      ...usual,
      apply: async (tx, items) => {
        for (const item of items) await write(tx, item.body)
        if (++calls === 1) await terminateBackendOf(tx)
        return items.map(() => calls)
      },
    })
    const submit = () => intake.submit(op, { lane: 'a', n: 1 }, { idempotencyKey: 'k' })
    expect(await submit()).toMatchObject({ kind: 'refused', refusal: { code: 'store_unavailable' } })
    expect(await submit()).toMatchObject({ kind: 'done', result: 2, replayed: false })
    expect(await effects()).toEqual([1])
    expect(end.faults).toEqual([])
    expect(await b.audit()).toEqual([])
  })
})

describe('a process that vanished without a word', () => {
  const allowedMs = async (tx: Tx): Promise<number> => {
    const { rows } = await tx.query<{ ms: number }>(
      "SELECT setting::int AS ms FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'",
    )
    return rows[0]?.ms ?? -1
  }

  it("may be idle in a handler's transaction for the operation's timeout and a grace, not longer", async () => {
    const intake = await b.intake()
    const op = intake.define('op', {
      ...usual,
      timeoutMs: (body) => body.n,
      run: (_, ctx) => allowedMs(ctx.tx),
    })
    for (const n of [1_500, 30_000]) {
      expect(await intake.submit(op, { lane: 'a', n })).toMatchObject({ kind: 'done', result: n + graceMs })
    }
  })

  it("may be idle in an accepting transaction for the store's timeout and a grace", async () => {
    const intake = await b.intake({ postgres: { timeoutMs: 3_000 } })
    const op = intake.define('op', {
      ...usual,
      apply: async (tx, items) => {
        const ms = await allowedMs(tx)
        return items.map(() => ms)
      },
    })
    expect(await intake.submit(op, { lane: 'a', n: 1 })).toMatchObject({ kind: 'done', result: 3_000 + graceMs })
  })

  it("loses the locks of its handler's transaction", async () => {
    const proxy = await halfOpen()
    const intake = await b.intake({ wrap: (store) => overriding(store, { begin: beginThrough(proxy) }) })
    const locked = signal()
    const op = intake.define('op', {
      ...usual,
      run: async (_, ctx) => {
        if (ctx.attempt > 1) return
        await ctx.tx.query('SELECT pg_advisory_xact_lock(1)')
        proxy.stall()
        locked.fire()
        await new Promise(() => undefined)
      },
    })
    void intake.submit(op, { lane: 'a', n: 1 }, { waitMs: 0 })
    await locked.promise
    const isFree = async (): Promise<boolean> =>
      (await b.sql<{ free: boolean }>('SELECT pg_try_advisory_xact_lock(1) AS free'))[0]?.free === true
    expect(await isFree()).toBe(false)
    await eventually(
      async () => ((await isFree()) ? true : undefined),
      'the lock to be free',
      timeoutMs + graceMs + 4_000,
    )
  })

  it('loses the lock of the lane that it was accepting into', async () => {
    const proxy = await halfOpen()
    const lost = await b.intake({ postgres: { url: through(proxy, b.url) } })
    const stalled = signal()
    const slow = lost.define('op', {
      ...usual,
      apply: async (tx, items) => {
        for (const item of items) await write(tx, item.body)
        proxy.stall()
        stalled.fire()
        return new Promise<never>(() => undefined).then(() => items.map(() => 0))
      },
    })
    void lost.submit(slow, { lane: 'a', n: 1 })
    await stalled.promise
    const other = await b.intake()
    const quick = other.define('op', {
      ...usual,
      apply: async (tx, items) => {
        for (const item of items) await write(tx, item.body)
        return items.map(() => 0)
      },
    })
    await eventually(
      async () => {
        const answer = await other.submit(quick, { lane: 'a', n: 2 }, { idempotencyKey: 'k' })
        return answer.kind === 'done' ? true : undefined
      },
      'another process to accept into the lane',
      15_000,
    )
    expect(await effects()).toEqual([2])
    expect(await b.audit()).toEqual([])
  })
})

/** Handlers' transactions only go through the proxy: the rest of the store is well. */
function beginThrough(proxy: HalfOpenProxy, change: (tx: OpenTx) => OpenTx = (tx) => tx): Store['begin'] {
  const behind = postgres({ url: through(proxy, b.url), poolMax: 8 })
  proxies.push(behind)
  return async (ms) => change(await behind.begin(ms))
}

/** Whatever is connected says nothing any more, for ever; new connections are well. */
function silence(proxy: HalfOpenProxy): void {
  proxy.stall()
  proxy.resumeNew()
}

describe("a handler's connection that is silent", () => {
  /** Runs one operation, and `silenceAt` says when of its first attempt its connection falls silent. */
  async function runThrough(proxy: HalfOpenProxy, silenceAt: 'begin' | 'settle' | 'commit'): Promise<void> {
    let quiet = false
    const fallSilent = (): void => {
      if (!quiet) silence(proxy)
      quiet = true
    }
    const begin = beginThrough(proxy, (tx) => ({
      ...tx,
      commit: () => {
        if (silenceAt === 'commit') fallSilent()
        return tx.commit()
      },
    }))
    // With a connection in the pool, which is the one that the operation gets.
    await (await begin(timeoutMs)).rollback()
    const intake = await b.intake({ wrap: (store) => overriding(store, { begin }) })
    const op = intake.define('op', {
      ...usual,
      run: async (body, ctx) => {
        if (silenceAt === 'begin') fallSilent()
        await write(ctx.tx, body)
        if (silenceAt === 'settle') fallSilent()
      },
    })
    const first = idOf(await intake.submit(op, { lane: 'a', n: 1 }, { respondAsync: true }))
    const second = idOf(await intake.submit(op, { lane: 'a', n: 2 }, { respondAsync: true }))
    // What it wrote may be locked until the database gives the silent session up.
    const msMax = letGoMsMax + timeoutMs + graceMs
    expect((await b.finished(first, msMax)).status).toBe('completed')
    expect((await b.finished(second, msMax)).status).toBe('completed')
    expect(quiet).toBe(true)
    expect((await b.ticket(first)).attempts).toBeGreaterThan(1)
    expect(await effects()).toEqual([1, 2])
    expect(await b.audit()).toEqual([])
  }

  it.each(['begin', 'settle', 'commit'] as const)(
    "from %s on: its lane goes on after the operation's timeout, with the effect once",
    async (silenceAt) => runThrough(await halfOpen(), silenceAt),
  )

  it('and no other is free: the attempt ends with its timeout, and the lane continues when one is', async () => {
    const proxy = await halfOpen()
    const intake = await b.intake({ wrap: (store) => overriding(store, { begin: beginThrough(proxy) }) })
    const op = intake.define('op', { ...usual, run: async (body, ctx) => void (await write(ctx.tx, body)) })
    proxy.stall()
    const id = idOf(await intake.submit(op, { lane: 'a', n: 1 }, { respondAsync: true }))
    await eventually(
      async () => ((await b.ticket(id)).attempts > 0 ? true : undefined),
      'the first attempt to be over',
      letGoMsMax,
    )
    await proxy.pass()
    expect((await b.finished(id)).status).toBe('completed')
    expect(await effects()).toEqual([1])
    expect(await b.audit()).toEqual([])
  })
})

/** Unlike the half-open proxy it does not answer the end of a connection either, once it is mute. */
async function startMuteProxy(target: { host: string; port: number }) {
  const sockets = new Set<Socket>()
  const server = createServer({ allowHalfOpen: true }, (near) => {
    const far = connect({ ...target, allowHalfOpen: true })
    for (const socket of [near, far]) {
      sockets.add(socket)
      socket.on('error', () => socket.destroy())
    }
    near.pipe(far)
    far.pipe(near)
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const proxy = {
    port: (server.address() as AddressInfo).port,
    mute: (): void => {
      for (const socket of sockets) socket.unpipe().pause()
    },
    close: async (): Promise<void> => {
      for (const socket of sockets) socket.destroy()
      server.close()
      await once(server, 'close')
    },
  }
  proxies.push(proxy)
  return proxy
}

describe('closing', () => {
  const closes = async (intake: Intake, msMax: number): Promise<void> => {
    const ended = { yet: false }
    const closing = intake.close().then(() => {
      ended.yet = true
    })
    await eventually(() => (ended.yet ? true : undefined), 'close to end', msMax)
    await closing
  }
  const urlThrough = (proxy: { port: number }): string => {
    const url = new URL(b.url)
    url.host = `127.0.0.1:${proxy.port}`
    return url.href
  }

  it('ends though the connection for wake-ups is silent', async () => {
    const proxy = await startMuteProxy(addressOf(b.url))
    const listening = postgres({ url: urlThrough(proxy), timeoutMs: 500 })
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          listen: (onWake) => listening.listen(onWake),
          close: async () => {
            await listening.close()
            await store.close()
          },
        }),
    })
    proxy.mute()
    await closes(intake, 5_000)
  })

  it('ends though every connection is silent', async () => {
    const proxy = await startMuteProxy(addressOf(b.url))
    const intake = await b.intake({ postgres: { url: urlThrough(proxy), timeoutMs: 500 }, drainMs: 200 })
    const op = intake.define('op', { ...usual, run: () => 1 })
    expect(await intake.submit(op, { lane: 'a', n: 1 })).toMatchObject({ kind: 'done' })
    proxy.mute()
    await closes(intake, 10_000)
  })
})
