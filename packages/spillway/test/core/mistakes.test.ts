/** Mistakes that people make, and the message that each of them gets: the call, the option, the value, what is allowed. */
import pg from 'pg'
import Type from 'typebox'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { capacity, connections, createIntake, type Definition, halt, postgres, pressure } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import { type Bench, bench } from '../pipeline-fixture.js'

let b: Bench
let intake: Intake
let defined = 0

beforeAll(async () => {
  b = await bench()
  intake = await b.intake()
})
afterAll(() => b.close())

const run = (): number => 1

/** Anything, as a user without types would give it. */
const define = (options: unknown, name = `mistake.${++defined}`): unknown => intake.define(name, options as never)

describe('define', () => {
  it.each<[string, () => unknown, string]>([
    ['no run', () => define({ body: Type.String() }), 'run is missing: the function that does the work'],
    ['no options', () => define(undefined), 'the options must be an object; given: undefined'],
    ['a list as options', () => define([]), 'the options must be an object; given: []'],
    ['run that is no function', () => define({ run: 'later' }), "run must be a function; given: 'later'"],
    ['run and apply', () => define({ run, apply: run }), 'run and apply exclude each other; remove one of them'],
    [
      'apply that is no effect',
      () => define({ apply: {} }),
      'apply must be a function (tx, items) => results, or a Sql',
    ],
    ['slots with apply', () => define({ apply: run, slots: { name: 'a', concurrency: 1 } }), 'slots cannot be used'],
    ['pendingMax with run', () => define({ run, pendingMax: 1 }), 'pendingMax cannot be used together with run'],
    ['a misspelt option', () => define({ run, maxRetrys: 2 }), 'unknown option "maxRetrys"; did you mean maxRetries?'],
    ['an unknown option', () => define({ run, colour: 'red' }), 'unknown option "colour"; the options are body, lane'],
    [
      'a gate that was not called',
      () => define({ run, gates: [pressure] }),
      'its item 0 is the function pressure: call it',
    ],
    ['a gate that is none', () => define({ run, gates: [halt(), {}] }), 'its item 1 is not a gate'],
    [
      'gates that are no list',
      () => define({ run, gates: halt() }),
      'gates must be a list of gates, as in [pressure()',
    ],
    [
      'two capacity gates',
      () => define({ run, gates: [capacity({ limit: 1 }), capacity({ limit: 2 })] }),
      'two capacity',
    ],
    [
      'a priority of 99',
      () => define({ run, priority: 99 }),
      'priority must be a whole number from 1 to 10, or a func',
    ],
    ['a priority of "high"', () => define({ run, priority: 'high' }), "or a function; given: 'high'"],
    ['no time', () => define({ run, timeoutMs: 0 }), 'timeoutMs must be a whole number from 1 to 2147483647, or a'],
    ['negative retries', () => define({ run, maxRetries: -1 }), 'maxRetries must be a whole number from 0 to 1000000'],
    ['a delay that is no function', () => define({ run, delayMs: 5 }), 'delayMs must be a function; given: 5'],
    [
      'a lane as a text',
      () => define({ run, lane: 'orders' }),
      'lane must be a function (body, request) => lane, or an',
    ],
    [
      'a key without a number',
      () => define({ run, lane: { key: () => 'k' } }),
      'or an object { key, concurrency }: key is a function, and concurrency a whole number from 1 to 1000000',
    ],
    [
      'a key for rows',
      () => define({ apply: run, lane: { key: () => 'k', concurrency: 2 } }),
      'lane must be a function; given: { key:',
    ],
    ['an unknown way to be busy', () => define({ run, whenBusy: 'drop' }), 'whenBusy must be "queue" or "refuse"'],
    [
      'a wait without an end',
      () => define({ run, whenBusy: { wait: '1s' } }),
      'whenBusy must be an object { wait, then }: wait is milliseconds from 0 to 10000, or a text like 500ms',
    ],
    [
      'a wait of a minute',
      () => define({ run, whenBusy: { wait: '1m', then: 'queue' } }),
      'whenBusy must be an object { wait, then }: wait is milliseconds from 0 to 10000',
    ],
    [
      'a wait of rows',
      () => define({ apply: run, whenBusy: { wait: 5, then: 'queue' } }),
      'whenBusy must be "queue" or "refuse"',
    ],
    [
      'back-off that shrinks',
      () => define({ run, retry: { baseMs: 9, maxMs: 1 } }),
      'retry must be an object { baseMs',
    ],
    [
      'slots without a number',
      () => define({ run, slots: { name: 'long' } }),
      'slots must be an object { name, concurr',
    ],
    [
      'negative concurrency',
      () => define({ run, slots: { name: 'x', concurrency: -1 } }),
      'a whole number of at least 1',
    ],
    ['abortable: 1', () => define({ run, abortable: 1 }), 'abortable must be true or false; given: 1'],
    [
      'a foreign schema',
      () => define({ run, body: { parse: () => 1 } }),
      'body must be a schema of TypeBox or of a lib',
    ],
    [
      'a JSON schema',
      () => define({ run, body: { type: 'object' } }),
      'body must be a schema of TypeBox or of a libra',
    ],
    ['a name with a space', () => define({ run }, 'my job'), 'define("my job"): the name must be 1 to 100 letters'],
    ['no name', () => define({ run }, ''), 'define(""): the name must be 1 to 100 letters, digits, dots'],
    ['one name twice', () => [define({ run }, 'twice'), define({ run }, 'twice')], 'twice is defined already'],
  ])('%s', (_, mistake, message) => {
    expect(mistake).toThrow(message)
    expect(mistake).toThrow(expect.objectContaining({ name: 'OptionError', code: 'invalid_option' }))
  })
})

describe('gates', () => {
  it.each<[string, () => unknown, string]>([
    ['capacity without options', () => capacity(undefined as never), 'capacity: the options must be an object'],
    ['capacity without a limit', () => capacity({} as never), 'capacity: limit is missing'],
    ['a limit of 0', () => capacity({ limit: 0 }), 'capacity: limit must be a whole number of at least 1; given: 0'],
    [
      'resuming above the limit',
      () => capacity({ limit: 5, resumeBelow: 6 }),
      'resumeBelow must be a whole number from 1 to 5',
    ],
    ['a misspelt limit', () => capacity({ limits: 5 } as never), 'unknown option "limits"; did you mean limit?'],
    ['connections without a total', () => connections({ perIdentity: 1 } as never), 'connections: total is missing'],
    ['a level that is none', () => pressure({ refuseAt: 'high' as never }), 'refuseAt must be "warning" or "active"'],
    ['a time in the past', () => pressure({ retryAfterSeconds: -1 }), 'retryAfterSeconds must be a number of seconds'],
    ['a scope that is no text', () => halt({ scope: 7 as never }), 'scope must be a text that is not empty; given: 7'],
  ])('%s', (_, mistake, message) => {
    expect(mistake).toThrow(message)
  })
})

describe('postgres', () => {
  it.each<[string, unknown, string]>([
    ['no options', undefined, 'postgres: the options must be an object; given: undefined'],
    ['no url', {}, 'postgres: url is missing; is the variable that should have it set?'],
    ['url: undefined', { url: undefined }, 'postgres: url is missing; is the variable that should have it set?'],
    ['an empty url', { url: '' }, "postgres: url must be a text like postgres://user@host:5432/database; given: ''"],
    ['a small pool', { url: 'postgres://h/d', poolMax: 2 }, 'poolMax must be a whole number from 8 to 10000; given: 2'],
    ['a url and a pool', { url: 'postgres://h/d', pool: new pg.Pool() }, 'url and pool exclude each other; remove one'],
    ['a pool of 5', { pool: new pg.Pool({ max: 5 }) }, 'postgres: the max of pool must be at least 8'],
    ['a misspelt option', { url: 'postgres://h/d', poolmax: 9 }, 'unknown option "poolmax"; did you mean poolMax?'],
  ])('%s', (_, options, message) => {
    expect(() => postgres(options as never)).toThrow(message)
  })

  it('shows no password', () => {
    expect(() => postgres({ url: 'mysql://me:secret@host/db' })).toThrow('mysql://me:…@host/db')
  })
})

describe('createIntake', () => {
  it.each<[string, unknown, string]>([
    ['no options', undefined, 'createIntake: the options must be an object; given: undefined'],
    ['no store', {}, 'createIntake: store must be postgres({ url }) or embedded(); given: undefined'],
    ['an address as the store', { store: 'postgres://h/d' }, "or embedded(); given: 'postgres://h/d'"],
    ['an identity that is no function', { store: {}, identity: 'ann' }, "identity must be a function; given: 'ann'"],
    ['a misspelt option', { store: {}, concurency: 5 }, 'unknown option "concurency"; did you mean concurrency?'],
    ['no concurrency', { store: {}, concurrency: 0 }, 'concurrency must be a whole number from 1 to 100000; given: 0'],
    ['console as the log', { store: {}, log: {} }, 'log must be an object with the methods debug, info, warn, error'],
    ['waitForStore: "no"', { store: {}, waitForStore: 'no' }, 'waitForStore must be true or false, or "forever"'],
    ['an unknown role', { store: {}, role: 'gateway' }, 'role must be "accept" or "direct" or "work" or "both"'],
    ['work, as it was', { store: {}, work: false }, 'unknown option "work"; the options are store, '],
    ['a registry as metrics', { store: {}, metrics: {} }, 'metrics must be what createMetrics(registry) returns'],
  ])('%s', async (_, options, message) => {
    await expect(createIntake(options as never)).rejects.toThrow(message)
  })

  it.each<[string, (url: URL) => void, RegExp]>([
    [
      'a port where nothing listens',
      (url) => Object.assign(url, { port: '1' }),
      /database 127\.0\.0\.1:1\/\w+ cannot be used: connect ECONNREFUSED 127\.0\.0\.1:1\. Check the url/,
    ],
    [
      'a database that is missing',
      (url) => Object.assign(url, { pathname: '/nowhere' }),
      /cannot be used: database "nowhere" does not exist\./,
    ],
    [
      'a user that is missing',
      (url) => Object.assign(url, { username: 'nobody-here' }),
      /cannot be used: .*"nobody-here"/,
    ],
  ])('%s', async (_, change, message) => {
    const url = new URL(b.url)
    change(url)
    const fault = await createIntake({ store: postgres({ url: url.href }), log: quiet, connectTimeoutMs: 500 }).then(
      (opened) => opened.close(),
      (error: unknown) => error,
    )
    expect(fault).toMatchObject({
      name: 'ConnectFault',
      code: 'store_unavailable',
      message: expect.stringMatching(message),
    })
    const { password } = new URL(b.url)
    if (password !== '') expect((fault as Error).message).not.toContain(password)
  })
})

describe('submit, submitMany, enqueue and enqueueMany', () => {
  const calls = (options: object): Record<string, () => Promise<unknown>> => {
    const op = intake.define(`options.${++defined}`, { run })
    return {
      submit: () => intake.submit(op, 1, options),
      submitMany: () => intake.submitMany(op, [1], options),
      enqueue: () => intake.transaction((tx) => intake.enqueue(op, 1, { ...options, tx })),
      enqueueMany: () => intake.transaction((tx) => intake.enqueueMany(op, [1], { ...options, tx })),
    }
  }
  it.each<[string, object, string]>([
    ['a misspelt option', { proirity: 1 }, 'unknown option "proirity"; did you mean priority?'],
    ['a priority of 0', { priority: 0 }, 'priority must be a whole number from 1 to 10'],
    ['half a retry', { maxRetries: 0.5 }, 'maxRetries must be a whole number from 0 to 1000000'],
    [
      'a delay without a unit',
      { delay: '10' },
      'delay must be milliseconds from 0 to 31622400000, or a text like 500ms',
    ],
    ['a delay in weeks', { delay: '2w' }, 'or a text like 500ms, 10s, 15m, 1h or 7d'],
    ['a negative delay', { delay: -1 }, 'delay must be milliseconds from 0 to'],
    ['a delay of two years', { delay: '731d' }, 'delay must be milliseconds from 0 to 31622400000'],
    ['a time as a text', { runAt: '2030-01-01' }, 'runAt must be a valid Date within the next 366 days'],
    ['a Date that is none', { runAt: new Date('soon') }, 'runAt must be a valid Date within the next 366 days'],
    ['a time in ten years', { runAt: new Date(Date.now() + 4e11) }, 'runAt must be a valid Date within the next 366'],
    ['delay and runAt', { delay: 1, runAt: new Date() }, 'delay and runAt exclude each other; remove one of them'],
    ['no time', { timeout: 0 }, 'timeout must be milliseconds from 1 to 2147483647, or a text like 500ms'],
    ['a lane that is a number', { lane: 7 }, 'lane must be a queue name, or [queue, partition]'],
    ['a lane of three names', { lane: ['a', 'b', 'c'] }, 'lane must be a queue name, or [queue, partition]'],
    ['an identity with NUL', { identity: 'a\0b' }, 'identity must be a text of 1 to 255 characters, without NUL'],
    ['an empty key', { idempotencyKey: '' }, 'idempotencyKey must be a text of 1 to 255 characters'],
    ['a long key', { idempotencyKey: 'k'.repeat(256) }, 'idempotencyKey must be a text of 1 to 255 characters'],
  ])('%s', async (_, options, message) => {
    for (const [call, mistake] of Object.entries(calls(options))) {
      await expect(mistake(), call).rejects.toThrow(message)
      await expect(mistake(), call).rejects.toThrow(`${call}: `)
    }
  })

  it.each<[string, (op: Definition) => Promise<unknown>, string]>([
    [
      'one body',
      (op) => intake.submitMany(op, { n: 1 } as never),
      'the second argument must be a list of at most 10000 b',
    ],
    ['too many', (op) => intake.submitMany(op, Array(10_001).fill(1)), 'must be a list of at most 10000 bodies'],
    [
      'too much',
      (op) => intake.submitMany(op, Array(70).fill('x'.repeat(1_000_000))),
      'have more than 67108864 characters of JSON; nothing was written. Use several calls',
    ],
    ['waiting', (op) => intake.submitMany(op, [1], { waitMs: 5 } as never), 'submitMany: unknown option "waitMs"'],
    [
      'a function that returns nonsense',
      (op) => intake.submitMany(op, [1, 2], { delay: (_, i) => (i === 1 ? 'soon' : 0) }),
      'submitMany: item 1: delay must be',
    ],
    [
      'a body that is a function',
      (op) => intake.submitMany(op, [1, run]),
      'cannot be stored as JSON: it is a function',
    ],
    [
      'no transaction',
      (op) => intake.enqueueMany(op, [1], {} as never),
      'enqueueMany: tx must be a node-postgres client',
    ],
    [
      'the client as the option',
      (op) => intake.enqueue(op, 1, { query: run } as never),
      'is { tx: client }, not the cl',
    ],
    [
      'waiting in a transaction',
      (op) => intake.enqueue(op, 1, { waitMs: 5 } as never),
      'enqueue: unknown option "waitMs"',
    ],
    ['no options', (op) => intake.enqueue(op, 1, undefined as never), 'enqueue: the options must be an object'],
    ['a body that is a symbol', (op) => intake.submit(op, Symbol('x')), 'cannot be stored as JSON: it is a symbol'],
    [
      'a body that contains itself',
      (op) => {
        const body: Record<string, unknown> = {}
        body.self = body
        return intake.submit(op, body)
      },
      'cannot be stored as JSON: Converting circular structure',
    ],
  ])('%s', async (_, mistake, message) => {
    const op = intake.define(`calls.${++defined}`, { run })
    await expect(mistake(op)).rejects.toThrow(message)
    await expect(mistake(op)).rejects.toMatchObject({ name: 'OptionError', code: 'invalid_option' })
  })

  it('name the mistake in a call', async () => {
    const op = intake.define('calls', { run })
    const submit = (options: unknown) => intake.submit(op, 1, options as never)
    await expect(submit({ idempotencykey: 'k' })).rejects.toThrow(
      'submit: unknown option "idempotencykey"; did you mean',
    )
    await expect(submit({ idempotencyKey: '' })).rejects.toThrow('idempotencyKey must be a text of 1 to 255 characters')
    await expect(submit({ waitMs: -1 })).rejects.toThrow(
      'waitMs must be a whole number from 0 to 2147483647; given: -1',
    )
    await expect(submit({ identity: 7 })).rejects.toThrow(
      'identity must be a text of 1 to 255 characters, without NUL; given: 7',
    )
    await expect(intake.submit({ type: 'unknown' }, 1)).rejects.toThrow('unknown is not defined on this intake')
    await expect(intake.submit(op, 10n)).rejects.toThrow('a body of calls cannot be stored as JSON: Do not know how to')
  })

  it('name what the functions of a definition returned', async () => {
    const lost = intake.define('lost', { run, lane: () => undefined as never })
    await expect(intake.submit(lost, 1)).rejects.toThrow(
      'the operation type lost: what lane returns must be a queue name, or [queue, partition]; given: undefined',
    )
    const urgent = intake.define('urgent', { run, priority: () => 11 })
    await expect(intake.submit(urgent, 1)).rejects.toThrow('what priority returns must be a whole number from 1 to 10')
    const timeless = intake.define('timeless', { run, timeoutMs: () => Number.NaN })
    await expect(intake.submit(timeless, 1)).rejects.toThrow('what timeoutMs returns must be a whole number from 1')
  })

  it('enqueue only inside a transaction', async () => {
    const op = intake.define('enqueued', { run })
    const pool = new pg.Pool({ connectionString: b.url, max: 1 })
    const client = await pool.connect()
    const old = { query: client.query.bind(client) } as unknown as pg.PoolClient
    try {
      await expect(intake.enqueue(op, 1, { tx: pool as never })).rejects.toThrow(
        'given: a Pool. Take a client with pool.connect',
      )
      await expect(intake.enqueue(op, 1, { tx: undefined as never })).rejects.toThrow(
        'enqueue: tx must be a node-postgres client inside a t',
      )
      await expect(intake.enqueue(op, 1, { tx: client })).rejects.toThrow('this client is in none. Call BEGIN first')
      await expect(intake.enqueue(op, 1, { tx: old })).rejects.toThrow('this client is in none. Call BEGIN first')
      await client.query('BEGIN')
      expect(await intake.enqueue(op, 1, { tx: old })).toMatchObject({ kind: 'queued' })
      await client.query('SELECT 1 / 0').catch(() => undefined)
      await expect(intake.enqueue(op, 1, { tx: client })).rejects.toThrow('can only be rolled back')
      await expect(intake.enqueue(op, 1, { tx: old })).rejects.toThrow('can only be rolled back')
      await client.query('ROLLBACK')
    } finally {
      client.release()
      await pool.end()
    }
    expect(await b.sql('SELECT FROM spillway.ops WHERE type = $1', ['enqueued'])).toEqual([])
  })

  it('an intake that is closed says so in every call', async () => {
    const own = await b.intake()
    const op = own.define('closed', { run })
    await own.close()
    const closed = 'this intake is closed, and so are its connections'
    await expect(own.transaction(async () => 1)).rejects.toThrow(closed)
    await expect(own.read('SELECT 1')).rejects.toThrow(closed)
    await expect(own.halt('drill')).rejects.toThrow(closed)
    await expect(own.lanes.pause({ type: op.type })).rejects.toThrow(closed)
    await expect(own.ledger.verify()).rejects.toThrow(closed)
    expect(await own.submitMany(op, [1])).toMatchObject([{ kind: 'refused', refusal: { code: 'draining' } }])
    await expect(own.enqueueMany(op, [1], { tx: { query: run } as never })).rejects.toThrow('this intake is closed')
  })

  it('after close', async () => {
    const own = await b.intake()
    const op = own.define('late', { run })
    await own.close()
    expect(await own.submit(op, 1)).toMatchObject({ kind: 'refused', refusal: { code: 'draining' } })
    await expect(own.enqueue(op, 1, { tx: { query: run } } as never)).rejects.toThrow('enqueue: this intake is closed')
    expect(() => own.define('later', { run })).toThrow('define("later"): this intake is closed')
  })
})

describe('what a handler returns', () => {
  const cycle: Record<string, unknown> = {}
  cycle.self = cycle
  it.each<[string, () => unknown, string]>([
    [
      'a BigInt',
      () => ({ total: 10n }),
      'cannot be stored as JSON: Do not know how to serialize a BigInt. Return JSON v',
    ],
    [
      'what contains itself',
      () => cycle,
      'cannot be stored as JSON: Converting circular structure to JSON. Return JSON',
    ],
    [
      'a function',
      () => run,
      'is a function, which JSON does not have. Return JSON values only. It ran, and is not tried',
    ],
    ['a symbol', () => Symbol('x'), 'is a symbol, which JSON does not have'],
    [
      'too much',
      () => 'x'.repeat(5_000_000),
      'has 5000002 characters of JSON; 4194304 are allowed. Store it elsewhere',
    ],
    [
      'what has a toJSON that throws',
      () => ({ toJSON: () => run.call(undefined) && JSON.parse('{') }),
      'cannot be stored',
    ],
  ])('%s: it fails at once, with a dead letter that says so', async (_, returned, message) => {
    let runs = 0
    const op = intake.define(`returns.${++defined}`, {
      run: () => {
        runs++
        return returned()
      },
    })
    const used = intake.define(`returns.${++defined}`, {
      run: async (_body, { tx }) => {
        await tx.query('SELECT 1')
        return returned()
      },
    })
    const applied = intake.define(`returns.${++defined}`, {
      maxRetries: 0,
      apply: async (_tx, items) => items.map(returned),
    })
    for (const definition of [op, used]) {
      const answer = await intake.submit(definition, 1, { waitMs: 30_000, idempotencyKey: 'k' })
      expect(answer).toMatchObject({ kind: 'failed', expected: false, error: expect.stringContaining(message) })
      if (answer.kind !== 'failed') return
      expect(answer.error).toContain(`the result of ${definition.type} `)
      expect((await b.ticket(answer.operationId)).attempts).toBe(1)
      expect(await intake.store.deadLetter(answer.operationId)).not.toBeNull()
    }
    expect(runs).toBe(1)
    expect(await intake.submit(applied, 1)).toMatchObject({ kind: 'refused', refusal: { code: 'internal_error' } })
    const later = await intake.submit(applied, 1, { respondAsync: true, waitMs: 30_000 })
    expect(later).toMatchObject({ kind: 'failed', error: expect.stringContaining(message) })
    expect(await b.audit()).toEqual([])
  })

  it.each<[string, unknown, unknown]>([
    ['nothing', undefined, null],
    ['null', null, null],
    ['NaN', Number.NaN, null],
    ['a Date', new Date(0), '1970-01-01T00:00:00.000Z'],
    ['a member that is undefined', { a: undefined, b: 1 }, { b: 1 }],
  ])('%s is kept as JSON has it', async (_, returned, kept) => {
    const op = intake.define(`returns.${++defined}`, { run: () => returned })
    const answer = await intake.submit(op, 1, { respondAsync: true, waitMs: 30_000 })
    expect(answer).toMatchObject({ kind: 'done', result: kept })
  })
})

it('an error of an apply with a code of its own is not taken for one of the database', async () => {
  const fault = Object.assign(new Error('declined'), { code: 'card_declined' })
  const op = intake.define('own.code', { apply: () => Promise.reject(fault) })
  expect(await intake.submit(op, 1)).toMatchObject({ kind: 'refused', refusal: { code: 'internal_error' } })
})

describe('what a handler throws', () => {
  const hidden = Object.create(null)
  Object.defineProperty(hidden, 'message', {
    enumerable: true,
    get: () => {
      throw new Error('no')
    },
  })
  it.each<[string, unknown, string]>([
    ['a text', 'out of stock', 'out of stock'],
    ['nothing', undefined, 'undefined'],
    ['null', null, 'null'],
    ['a number', 42, '42'],
    ['an object', { status: 402, why: 'declined' }, "{ status: 402, why: 'declined' }"],
    ['an object with a message', { message: 'declined' }, 'declined'],
    ['an object without a prototype', Object.create(null), '[Object: null prototype] {}'],
    ['what throws when it is read', hidden, '[Object: null prototype] { message: [Getter] }'],
    ['an error without a message', new RangeError(''), 'RangeError'],
    ['a symbol', Symbol('x'), 'Symbol(x)'],
  ])('%s', async (_, thrown, error) => {
    const op = intake.define(`throws.${++defined}`, {
      maxRetries: 0,
      run: () => {
        throw thrown
      },
    })
    const later = intake.define(`throws.${++defined}`, { maxRetries: 0, run: () => Promise.reject(thrown) })
    for (const definition of [op, later]) {
      expect(await intake.submit(definition, 1)).toMatchObject({ kind: 'failed', error })
    }
  })
})

const quiet = { debug: run, info: run, warn: run, error: run }

describe('tickets, dead letters and lanes', () => {
  const id = '01890000-0000-7000-8000-000000000000'
  const call = (which: 'tickets' | 'deadLetters' | 'lanes', name: string, ...given: unknown[]): unknown =>
    (intake[which] as unknown as Record<string, (...args: unknown[]) => unknown>)[name]?.(...given)

  it.each<[string, () => unknown, string]>([
    ['no id', () => call('tickets', 'get', undefined), 'tickets.get: the id must be a text that is not empty'],
    ['a name as definition', () => call('tickets', 'get', id, 'orders'), 'the definition must be what define returns'],
    ['a time that is none', () => call('tickets', 'wait', id, { timeoutMs: -1 }), 'tickets.wait: timeoutMs must be'],
    [
      'a misspelt time',
      () => call('tickets', 'wait', id, { timeout: 5 }),
      'unknown option "timeout"; did you mean timeoutMs?',
    ],
    ['a reason that is none', () => call('tickets', 'cancel', id, { why: 7 }), 'tickets.cancel: why must be a text'],
    ['a status', () => call('tickets', 'list', { status: 'done' }), 'status must be "pending" or "processing" or'],
    ['an unknown filter', () => call('tickets', 'list', { lane: 'a' }), 'tickets.list: unknown option "lane"'],
    ['a limit of 500', () => call('tickets', 'list', { limit: 500 }), 'limit must be a whole number from 1 to 200'],
    [
      'no point in time',
      () => call('tickets', 'list', { from: 'soon' }),
      "from must be a Date or an RFC 3339 text; given: 'soon'",
    ],
    [
      'a foreign cursor',
      () => call('tickets', 'list', { cursor: 'x' }),
      'cursor must be nextCursor of the page before',
    ],
    [
      'type and definition',
      () => call('tickets', 'list', { type: 'a' }, { type: 'b' }),
      'give a type or a definition, not both',
    ],
    [
      'nothing to redrive',
      () => call('deadLetters', 'redrive', {}),
      'deadLetters.redrive: give either ids or a filter',
    ],
    ['both', () => call('deadLetters', 'purge', { ids: [id], filter: {} }), 'deadLetters.purge: give either ids or a'],
    [
      'ids with a limit',
      () => call('deadLetters', 'redrive', { ids: [id], limit: 1 }),
      'limit is for a filter, not for ids',
    ],
    ['one id', () => call('deadLetters', 'redrive', { ids: id }), 'ids must be a list of ids'],
    ['a loose filter', () => call('deadLetters', 'purge', { queue: 'a' }), 'deadLetters.purge: unknown option "queue"'],
    [
      'a wrong filter',
      () => call('deadLetters', 'purge', { filter: { status: 'failed' } }),
      'filter: unknown option "status"',
    ],
    [
      'an expiry that is no time',
      () => define({ run, expiresAfter: 'soon' }),
      'expiresAfter must be milliseconds from 1 to',
    ],
    ['an expiry at once', () => define({ run, expiresAfter: 0 }), 'expiresAfter must be milliseconds from 1 to'],
    ['a lane as a text', () => call('lanes', 'pause', 'orders'), 'lanes.pause: the options must be an object'],
    ['an empty queue', () => call('lanes', 'pause', { queue: '' }), 'queue must be a text that is not empty'],
    [
      'no queue',
      () => call('lanes', 'resume', { partition: 'a' }),
      'lanes.resume: give { queue }, { queue, partition } or',
    ],
    [
      'a queue and a type',
      () => call('lanes', 'pause', { queue: 'a', type: 'b' }),
      'lanes.pause: give { queue }, { queue',
    ],
  ])('%s', async (_, mistake, message) => {
    await expect((async () => mistake())()).rejects.toThrow(message)
    await expect((async () => mistake())()).rejects.toThrow(expect.objectContaining({ code: 'invalid_option' }))
  })
})
