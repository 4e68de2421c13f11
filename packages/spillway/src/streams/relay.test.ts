import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { keyOf, MemoryStreamLog, watch } from '../../test/memory-stream-log.js'
import { LogFault, type StreamRecord } from './port.js'
import { Relay } from './relay.js'

const patienceMs = 3_000

function setup(options: { isLocal?: (id: string) => boolean } = {}) {
  const log = new MemoryStreamLog()
  const warnings: string[] = []
  const relay = new Relay({
    logs: { postgres: log },
    patienceMs,
    warn: (_, message) => warnings.push(message),
    ...options,
  })
  const follow = (id: string, after = 0) => relay.follow(keyOf(id), 'postgres', after)
  /** As this process's writer does: into the log, then to the relay. */
  const wrote = (id: string, record: StreamRecord): void => {
    log.put(id, record)
    relay.wrote(keyOf(id), record)
  }
  return { log, relay, follow, wrote, warnings }
}

const record = (first: number, ...chunks: string[]): StreamRecord => ({ first, chunks, end: null })
const settle = () => vi.advanceTimersByTimeAsync(0)

describe('Relay', () => {
  beforeEach(() => void vi.useFakeTimers())
  afterEach(() => void vi.useRealTimers())

  it('gives existing records joined, beginning after the cursor', async () => {
    const { log, follow } = setup()
    log.put('a', record(1, '1', '2', '3'))
    log.put('a', { first: 4, chunks: ['4', 'end'], end: 'done' })
    expect(await follow('a', 2).next()).toEqual({ first: 3, chunks: ['3', '4', 'end'], end: 'done' })
  })

  it('gives nothing behind an end', async () => {
    const { log, follow } = setup()
    log.put('a', { first: 1, chunks: ['end'], end: 'error' })
    const follower = follow('a')
    await follower.next()
    expect(await follower.next()).toBeNull()
    expect(follower.after).toBe(1)
  })

  it('hands over local records without reading the log again', async () => {
    const { log, follow, wrote } = setup()
    const follower = follow('a')
    const first = follower.next()
    await settle()
    const reads = log.reads.length
    wrote('a', record(1, '1'))
    expect(await first).toEqual(record(1, '1'))
    const second = follower.next()
    wrote('a', record(2, '2', '3'))
    expect(await second).toEqual(record(2, '2', '3'))
    expect(log.reads.length).toBe(reads)
  })

  it('hands over while a read is under way, and gives nothing twice when it answers', async () => {
    const { log, follow, wrote } = setup()
    const follower = follow('a')
    const release = log.hold('read')
    const first = follower.next()
    await settle()
    wrote('a', record(1, '1'))
    expect(await first).toEqual(record(1, '1'))
    const second = watch(follower.next())
    release()
    await settle()
    expect(second).toEqual({})
    wrote('a', record(2, '2'))
    await settle()
    expect(second.value).toEqual(record(2, '2'))
  })

  it('gives every follower of a stream the same, and none of another stream', async () => {
    const { follow, wrote } = setup()
    const all = ['a', 'a', 'b'].map((id) => watch(follow(id).next()))
    await settle()
    wrote('a', record(1, 'for a'))
    await settle()
    expect(all.map(({ value }) => value?.chunks)).toEqual([['for a'], ['for a'], undefined])
  })

  it('reads from the log what a follower missed while it was busy', async () => {
    const { follow, wrote } = setup()
    const follower = follow('a')
    const first = follower.next()
    await settle()
    wrote('a', record(1, '1'))
    await first
    wrote('a', record(2, '2'))
    wrote('a', record(3, '3'))
    expect(await follower.next()).toEqual(record(2, '2', '3'))
  })

  it('does not hand over a record beyond the cursor: it reads those in between', async () => {
    const { log, relay, follow } = setup()
    const follower = follow('a')
    const next = watch(follower.next())
    await settle()
    log.put('a', record(1, '1'))
    log.put('a', record(2, '2'))
    relay.wrote(keyOf('a'), record(2, '2'))
    await settle()
    expect(next.value).toEqual(record(1, '1', '2'))
  })

  it('reads when the bell rings, for all who wait in one call', async () => {
    const { log, relay, follow } = setup()
    const waiting = ['a', 'b', 'c'].map((id) => watch(follow(id).next()))
    await settle()
    log.put('a', record(1, 'a1'))
    log.put('b', record(1, 'b1'))
    relay.heard(['a', 'b', 'unknown'])
    await settle()
    expect(waiting.map(({ value }) => value?.chunks)).toEqual([['a1'], ['b1'], undefined])
    expect(log.reads.map((cursors) => cursors.map(({ key }) => key.id))).toEqual([
      ['a', 'b', 'c'],
      ['a', 'b'],
    ])
  })

  it('looks at all when the bell had a gap', async () => {
    const { log, relay, follow } = setup()
    const waiting = ['a', 'b'].map((id) => watch(follow(id).next()))
    await settle()
    log.put('b', record(1, 'b1'))
    relay.heard(null)
    await settle()
    expect(waiting.map(({ value }) => value?.chunks)).toEqual([undefined, ['b1']])
  })

  it('reads again when the bell rings during a read that had looked already', async () => {
    const { log, relay, follow } = setup()
    const release = log.hold('read')
    const next = watch(follow('a').next())
    await settle()
    log.put('a', record(1, '1'))
    relay.heard(['a'])
    release()
    await settle()
    expect(next.value).toEqual(record(1, '1'))
  })

  it('reads again when a record that does not fit was written during a read', async () => {
    const { log, relay, follow } = setup()
    const release = log.hold('read')
    const next = watch(follow('a').next())
    await settle()
    log.put('a', record(1, '1'))
    log.put('a', record(2, '2'))
    relay.wrote(keyOf('a'), record(2, '2'))
    release()
    await settle()
    expect(next.value).toEqual(record(1, '1', '2'))
  })

  it('remembers a bell for a follower that was busy', async () => {
    const { log, relay, follow } = setup()
    log.put('a', record(1, '1'))
    const follower = follow('a')
    await follower.next()
    log.put('a', record(2, '2'))
    relay.heard(['a'])
    const next = watch(follower.next())
    await settle()
    expect(next.value).toEqual(record(2, '2'))
  })

  it('looks at once when kicked', async () => {
    const { log, follow } = setup()
    const follower = follow('a')
    const next = watch(follower.next())
    await settle()
    log.put('a', record(1, '1'))
    follower.kick()
    await settle()
    expect(next.value).toEqual(record(1, '1'))
  })

  it('has one read at a time, without followers that joined meanwhile', async () => {
    const { log, follow } = setup()
    const release = log.hold('read')
    watch(follow('a').next())
    await settle()
    watch(follow('b').next())
    watch(follow('c').next())
    await settle()
    expect(log.reads).toHaveLength(1)
    release()
    await settle()
    expect(log.reads.map(({ length }) => length)).toEqual([1, 2])
  })

  it('finds chunks without a bell within about a second', async () => {
    const { log, follow } = setup()
    const next = watch(follow('a').next())
    await settle()
    log.put('a', record(1, '1'))
    await vi.advanceTimersByTimeAsync(1_250)
    expect(next.value).toEqual(record(1, '1'))
  })

  it('polls more and more slowly, at least every 5 s, and from the beginning after news', async () => {
    const { log, relay, follow } = setup()
    const follower = follow('a')
    let next = watch(follower.next())
    await vi.advanceTimersByTimeAsync(30_000)
    // At 1, 3, 7, 12, 17, 22, 27 s, or up to a quarter sooner each; and the first look.
    expect(log.reads.length).toBeGreaterThanOrEqual(7)
    expect(log.reads.length).toBeLessThanOrEqual(12)
    log.put('a', record(1, '1'))
    relay.heard(['a'])
    await settle()
    expect(next.value).toBeDefined()
    next = watch(follower.next())
    log.put('a', record(2, '2'))
    await vi.advanceTimersByTimeAsync(1_250)
    expect(next.value).toEqual(record(2, '2'))
  })

  it('does not poll a stream while it is written in this process', async () => {
    const local = new Set(['a'])
    const { log, follow } = setup({ isLocal: (id) => local.has(id) })
    const next = watch(follow('a').next())
    await vi.advanceTimersByTimeAsync(60_000)
    expect(log.reads).toHaveLength(1)
    local.clear()
    log.put('a', record(1, '1'))
    await vi.advanceTimersByTimeAsync(5_250)
    expect(next.value).toEqual(record(1, '1'))
  })

  it('runs no timer without waiters', async () => {
    const { relay, follow } = setup()
    const follower = follow('a')
    watch(follower.next())
    await settle()
    expect(vi.getTimerCount()).toBeGreaterThan(0)
    follower.close()
    await vi.advanceTimersByTimeAsync(6_000)
    expect(vi.getTimerCount()).toBe(0)
    expect(relay.followers).toBe(0)
  })

  it('gives 64 kB at most, and the rest with the next calls', async () => {
    const { log, follow } = setup()
    const chunk = 'x'.repeat(20_000)
    log.put('a', record(1, chunk, chunk))
    log.put('a', { first: 3, chunks: [chunk, chunk, 'end'], end: 'done' })
    const follower = follow('a')
    const sizes = []
    for (let got = await follower.next(); got !== null; got = await follower.next()) {
      sizes.push([got.first, got.chunks.length, got.end])
    }
    expect(sizes).toEqual([
      [1, 3, null],
      [4, 2, 'done'],
    ])
  })

  it('cuts a large record that is handed over, too', async () => {
    const { follow, wrote } = setup()
    const follower = follow('a')
    const next = watch(follower.next())
    await settle()
    const chunk = 'x'.repeat(40_000)
    wrote('a', record(1, chunk, chunk))
    await settle()
    expect(next.value?.chunks).toHaveLength(1)
    expect(await follower.next()).toEqual(record(2, chunk))
  })

  it('reads on where an answer was cut short before it', async () => {
    const { log, follow } = setup()
    const read = log.read.bind(log)
    log.read = async (cursors) =>
      (await read(cursors)).map((answer) => (log.reads.length > 1 ? answer : { records: [], more: true }))
    log.put('a', record(1, '1'))
    const next = watch(follow('a').next())
    await settle()
    expect(next.value).toEqual(record(1, '1'))
  })

  it('returns a single larger chunk completely', async () => {
    const { log, follow } = setup()
    log.put('a', record(1, 'x'.repeat(100_000), '2'))
    expect((await follow('a').next())?.chunks).toHaveLength(1)
  })

  it('reads at most 1,000 followers at once', async () => {
    const { log, follow } = setup()
    for (let n = 0; n < 2_500; n++) watch(follow(`s${n}`).next())
    await settle()
    expect(log.reads.map(({ length }) => length)).toEqual([1_000, 1_000, 500])
  })

  it('continues after a fault of the log that is shorter than its patience', async () => {
    const { log, follow } = setup()
    log.readFates.push('fault', 'fault')
    log.put('a', record(1, '1'))
    const next = watch(follow('a').next())
    await vi.advanceTimersByTimeAsync(150)
    expect(next.value).toEqual(record(1, '1'))
  })

  it('says that the log is away once it was for its patience; the follower may ask again', async () => {
    const { log, follow } = setup()
    log.readFates.push(...Array.from({ length: 8 }, () => 'fault' as const))
    const follower = follow('a')
    const next = watch(follower.next())
    await vi.advanceTimersByTimeAsync(patienceMs - 1)
    expect(next).toEqual({})
    await vi.advanceTimersByTimeAsync(1_000)
    expect(next.fault).toBeInstanceOf(LogFault)
    log.readFates.length = 0
    log.put('a', record(1, '1'))
    const again = watch(follower.next())
    await vi.advanceTimersByTimeAsync(1_000)
    expect(again.value).toEqual(record(1, '1'))
  })

  it('says so as well when a read never answers, though bells ring, and reads for others afterwards', async () => {
    const { log, relay, follow } = setup()
    const release = log.hold('read')
    const next = watch(follow('a').next())
    await settle()
    log.readGate = null
    for (let n = 0; n < 6; n++) {
      await vi.advanceTimersByTimeAsync(patienceMs / 6)
      relay.heard(['a'])
    }
    expect(next.fault).toBeInstanceOf(LogFault)
    log.put('b', record(1, 'b1'))
    const other = watch(follow('b').next())
    await settle()
    expect(other.value).toEqual(record(1, 'b1'))
    release()
    await settle()
  })

  it('fails only the stream that cannot be read', async () => {
    const { log, follow } = setup()
    const read = log.read.bind(log)
    log.read = async (cursors) => {
      if (cursors.some(({ key }) => key.id === 's5')) throw new TypeError('not this one')
      return read(cursors)
    }
    for (let n = 0; n < 8; n++) log.put(`s${n}`, record(1, '1'))
    const waiting = Array.from({ length: 8 }, (_, n) => watch(follow(`s${n}`).next()))
    await settle()
    expect(waiting.map(({ value }) => value?.first)).toEqual([1, 1, 1, 1, 1, undefined, 1, 1])
    expect(waiting[5]?.fault).toBeInstanceOf(LogFault)
  })

  it('says so when the log has lost chunks', async () => {
    const { log, follow, warnings } = setup()
    log.put('a', record(3, '3'))
    await expect(follow('a').next()).rejects.toBeInstanceOf(LogFault)
    expect(warnings).toEqual(['chunks of a stream are missing in the log'])
  })

  it('says so when the log of a stream is not configured', async () => {
    const { relay } = setup()
    await expect(relay.follow(keyOf('a'), 'redis', 0).next()).rejects.toBeInstanceOf(LogFault)
  })

  it('wakes its waiters with null when it is closed, and counts them no more', async () => {
    const { relay, follow } = setup()
    const [one, two] = [follow('a'), follow('a')]
    const next = watch(one.next())
    expect(relay.followers).toBe(2)
    one.close()
    one.close()
    await settle()
    expect(next.value).toBeNull()
    expect(relay.followers).toBe(1)
    two.close()
    expect(relay.followers).toBe(0)
  })

  it('continues for the other followers of a stream when one closes', async () => {
    const { follow, wrote } = setup()
    const followers = ['a', 'a', 'a'].map((id) => follow(id))
    const waiting = followers.map((follower) => watch(follower.next()))
    await settle()
    followers[1]?.close()
    wrote('a', record(1, '1'))
    await settle()
    expect(waiting.map(({ value }) => value?.first)).toEqual([1, undefined, 1])
  })

  it('lets everybody go when it closes', async () => {
    const { relay, follow } = setup()
    const waiting = ['a', 'a', 'b'].map((id) => watch(follow(id).next()))
    await settle()
    relay.close()
    await settle()
    expect(waiting.map(({ value }) => value)).toEqual([null, null, null])
    expect(await follow('c').next()).toBeNull()
    expect(vi.getTimerCount()).toBe(0)
    expect(relay.followers).toBe(0)
  })
})
