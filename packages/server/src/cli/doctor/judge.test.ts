import { describe, expect, it } from 'vitest'
import { judgeBroker } from './broker.js'
import { judgeServer, type ServerFacts } from './database.js'
import { checkBinaries, checkNode, judgeFreeDisk } from './machine.js'
import { judgeReach, judgeSettings, judgeWakeUps } from './reach.js'
import { judgeRedis } from './redis.js'

const good: ServerFacts = {
  versionNumber: 150_000,
  version: '15.0',
  encoding: 'UTF8',
  skewMs: -20,
  fsync: 'on',
  synchronousCommit: 'on',
  fullPageWrites: 'on',
  autovacuum: 'on',
  naptimeSeconds: 5,
}

const statesOf = (facts: Partial<ServerFacts>) =>
  judgeServer({ ...good, ...facts })
    .filter((finding) => finding.state !== 'right')
    .map(({ name, state }) => [name, state])

describe('judgeServer', () => {
  it('finds nothing in a good server', () => {
    expect(statesOf({})).toEqual([])
    expect(statesOf({ synchronousCommit: 'remote_apply' })).toEqual([])
    // Each of our connections turns it on.
    expect(statesOf({ synchronousCommit: 'off' })).toEqual([])
  })

  it.each<[Partial<ServerFacts>, string, string]>([
    [{ versionNumber: 149_999 }, 'version', 'wrong'],
    [{ encoding: 'SQL_ASCII' }, 'encoding', 'wrong'],
    [{ fsync: 'off' }, 'durability', 'wrong'],
    [{ fullPageWrites: 'off' }, 'durability', 'wrong'],
    [{ skewMs: 1_001 }, 'clock', 'hint'],
    [{ skewMs: -1_001 }, 'clock', 'hint'],
    [{ autovacuum: 'off' }, 'autovacuum', 'wrong'],
    [{ naptimeSeconds: 60 }, 'autovacuum', 'hint'],
  ])('%j', (facts, name, state) => {
    expect(statesOf(facts)).toEqual([[name, state]])
  })

  it('says how to fix whatever it finds', () => {
    const findings = judgeServer({ ...good, fsync: 'off', skewMs: 9_999, versionNumber: 1, naptimeSeconds: 60 })
    expect(findings.filter((finding) => finding.state !== 'right' && finding.fix === undefined)).toEqual([])
  })
})

describe('the machine', () => {
  it.each([
    ['20.19.0', 'right'],
    ['22.1.0', 'right'],
    ['20.18.9', 'wrong'],
    ['18.20.0', 'wrong'],
  ])('Node.js %s is %s', (version, state) => {
    expect(checkNode(version).state).toBe(state)
  })

  it('wants some free disk', () => {
    expect([0, 1e9, 1e10].map((bytes) => judgeFreeDisk(bytes).state)).toEqual(['wrong', 'hint', 'right'])
  })

  it('needs the binaries only without a database', () => {
    const missing = () => {
      throw Object.assign(new Error('no'), { code: 'MODULE_NOT_FOUND' })
    }
    expect(checkBinaries(true, missing).state).toBe('wrong')
    expect(checkBinaries(false, missing).state).toBe('hint')
  })
})

describe('the broker', () => {
  const there = {
    ok: true,
    shown: 'a:4222',
    version: '2.9.10',
    hasJetStream: true,
    payloadBytesMax: 8_388_608,
  } as const

  it('is right with JetStream and room for a task', () => {
    expect(judgeBroker(there)).toMatchObject({ state: 'right', detail: 'a:4222 answers: NATS 2.9.10 with JetStream' })
  })

  it.each([
    ['is unreachable', { ok: false, shown: 'a:4222', why: 'ConnectionError' } as const, 'wrong', /cannot be reached/],
    ['has no JetStream', { ...there, hasJetStream: false }, 'wrong', /without JetStream/],
    ['takes less than the largest task', { ...there, payloadBytesMax: 1_048_576 }, 'hint', /1048576 bytes/],
  ])('is reported when it %s', (_, probe, state, detail) => {
    expect(judgeBroker(probe)).toMatchObject({ state, detail: expect.stringMatching(detail) })
  })
})

describe('judgeRedis', () => {
  const shown = '127.0.0.1:6379'
  const server = { version: '7.0.15', evictsBy: null, isAppendOnly: true }

  it.each([
    ['one that keeps its streams', { ok: true, shown, server }, 'right'],
    ['one that does not tell what it is', { ok: true, shown, server: null }, 'right'],
    ['one whose restart ends streams', { ok: true, shown, server: { ...server, isAppendOnly: false } }, 'hint'],
    ['one that throws streams away', { ok: true, shown, server: { ...server, evictsBy: 'allkeys-lru' } }, 'wrong'],
    ['one that is away, without which all goes on', { ok: false, shown, why: 'ECONNREFUSED' }, 'hint'],
  ] as const)('%s', (_what, probe, state) => {
    expect(judgeRedis(probe)).toMatchObject({ name: 'redis', state })
  })
})

describe('the way to the database', () => {
  it.each([
    ['direct', 'the server itself', 'right'],
    ['session', 'session mode', 'right'],
    ['transaction', 'transaction mode', 'hint'],
  ] as const)('%s', (reach, said, wakeUps) => {
    expect(judgeReach(reach)).toMatchObject({ state: 'right', detail: expect.stringContaining(said) })
    expect(judgeWakeUps(reach).state).toBe(wakeUps)
  })

  it('lists settings of the role or the database: without effect, with effect, and fatal ones', () => {
    const found = judgeSettings([
      { name: 'DateStyle', value: 'SQL, DMY' },
      { name: 'synchronous_commit', value: 'off' },
      { name: 'search_path', value: 'app' },
      { name: 'statement_timeout', value: '5s' },
      { name: 'lock_timeout', value: '0' },
      { name: 'default_transaction_read_only', value: 'on' },
    ])
    expect(found.map(({ state, detail }) => [state, detail.split(' of the role')[0]])).toEqual([
      ['right', 'DateStyle = SQL, DMY, synchronous_commit = off'],
      ['hint', 'statement_timeout = 5s'],
      ['wrong', 'default_transaction_read_only = on'],
    ])
    expect(judgeSettings([{ name: 'default_transaction_read_only', value: 'off' }])).toEqual([])
  })
})
