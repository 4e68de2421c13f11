import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { keyOf, MemoryStreamLog } from '../../test/memory-stream-log.js'
import { LogWriter } from './log-writer.js'
import type { StreamRecord } from './port.js'

const patienceMs = 5_000

function setup() {
  const log = new MemoryStreamLog()
  const written: [string, StreamRecord][] = []
  const warnings: string[] = []
  const writer = new LogWriter({
    log,
    onWritten: (key, record) => written.push([key.id, record]),
    patienceMs,
    warn: (_fields, message) => warnings.push(message),
  })
  const open = (id: string, last = 0) => writer.open(keyOf(id), last, { ring: false })
  return { log, writer, written, warnings, open }
}

const settle = () => vi.advanceTimersByTimeAsync(0)
const kilobytes = (n: number) => 'x'.repeat(n * 1024)

describe('LogWriter', () => {
  beforeEach(() => void vi.useFakeTimers())
  afterEach(() => void vi.useRealTimers())

  it('writes the first chunk without waiting for a timer', async () => {
    const { log, open, written } = setup()
    open('a').push('one')
    await settle()
    expect(log.texts('a')).toEqual(['one'])
    expect(written).toEqual([['a', { first: 1, chunks: ['one'], end: null }]])
  })

  it('writes after the last chunk that it knows', async () => {
    const { log, open } = setup()
    const stream = open('a', 7)
    stream.push('eight')
    await settle()
    expect(log.records.get('a')?.[0]?.first).toBe(8)
    expect(stream.last).toBe(8)
  })

  it('joins chunks that arrive during a write into one record of each stream, in one call', async () => {
    const { log, open } = setup()
    const [a, b] = [open('a'), open('b')]
    const release = log.hold('append')
    a.push('1')
    await settle()
    a.push('2')
    b.push('x')
    a.push('3')
    b.push('y')
    await settle()
    expect(log.appends).toHaveLength(1)
    release()
    await settle()
    expect(log.appends).toHaveLength(2)
    expect(log.appends[1]?.map(({ key, first, chunks }) => [key.id, first, chunks])).toEqual([
      ['a', 2, ['2', '3']],
      ['b', 1, ['x', 'y']],
    ])
  })

  it('reports an end as written only when it is, together with pending chunks', async () => {
    const { log, writer, open } = setup()
    const stream = open('a')
    const release = log.hold('append')
    stream.push('1')
    let how = ''
    void stream.end('done', '[DONE]').then((answer) => {
      how = answer
    })
    await settle()
    expect(how).toBe('')
    release()
    await settle()
    expect(how).toBe('written')
    expect(log.records.get('a')).toMatchObject([{ first: 1, chunks: ['1', '[DONE]'], end: 'done' }])
    expect(writer.has('a')).toBe(false)
  })

  it('takes no chunk behind an end', () => {
    const { open } = setup()
    const stream = open('a')
    void stream.end('done', '[DONE]')
    expect(() => stream.push('more')).toThrow(/takes no more chunks/)
  })

  it('has one end: a second one is the first', async () => {
    const { log, open } = setup()
    const stream = open('a')
    const both = Promise.all([stream.end('done', 'first'), stream.end('cancelled', 'second')])
    await settle()
    expect(await both).toEqual(['written', 'written'])
    expect(log.texts('a')).toEqual(['first'])
  })

  it('still writes an end after which it was closed', async () => {
    const { log, open } = setup()
    const stream = open('a')
    void stream.end('error', 'broken')
    stream.close()
    await settle()
    expect(log.records.get('a')).toMatchObject([{ end: 'error' }])
  })

  it('drops pending chunks when it is closed without an end', async () => {
    const { log, writer, open } = setup()
    const stream = open('a')
    stream.push('1')
    stream.close()
    await settle()
    expect(log.appends).toEqual([])
    expect(writer.has('a')).toBe(false)
  })

  it('retries exactly the same records when an answer was lost, then later ones', async () => {
    const { log, open, written } = setup()
    const stream = open('a')
    log.appendFates.push('answer-lost', 'fault')
    stream.push('1')
    await settle()
    stream.push('2')
    await vi.advanceTimersByTimeAsync(49)
    expect(log.appends).toHaveLength(1)
    await vi.advanceTimersByTimeAsync(1)
    expect(log.appends).toHaveLength(2)
    await vi.advanceTimersByTimeAsync(100)
    expect(log.appends[1]).toEqual(log.appends[0])
    expect(log.appends[2]).toEqual(log.appends[0])
    expect(log.texts('a')).toEqual(['1', '2'])
    expect(written.map(([, record]) => record.first)).toEqual([1, 2])
  })

  it('backs off to a second at most', async () => {
    const { log, open } = setup()
    log.appendFates.push(...Array.from({ length: 100 }, () => 'fault' as const))
    open('a').push('1')
    await vi.advanceTimersByTimeAsync(4_900)
    // 0, 50, 150, 350, 750, 1550, 2550, 3550, 4550
    expect(log.appends).toHaveLength(9)
  })

  it('gives a stream up when the log was away for its patience, and says so', async () => {
    const { log, writer, open } = setup()
    const stream = open('a')
    log.appendFates.push(...Array.from({ length: 100 }, () => 'fault' as const))
    stream.push('1')
    const end = stream.end('done', '[DONE]')
    await vi.advanceTimersByTimeAsync(patienceMs - 1)
    expect(stream.gone).toBeNull()
    await vi.advanceTimersByTimeAsync(600)
    expect(await end).toBe('failed')
    expect(stream.gone).toBe('failed')
    expect(writer.has('a')).toBe(false)
    expect(() => stream.push('2')).toThrow('it takes no more chunks')
  })

  it('gives up a call that never answers, and writes other streams afterwards', async () => {
    const { log, open, warnings } = setup()
    const hung = open('hung')
    log.hold('append')
    hung.push('1')
    await settle()
    log.appendGate = null
    await vi.advanceTimersByTimeAsync(patienceMs - 10)
    open('young').push('x')
    await vi.advanceTimersByTimeAsync(10)
    expect(hung.gone).toBe('failed')
    expect(log.texts('young')).toEqual(['x'])
    expect(warnings).toContain('an append had no answer in time')
  })

  it('reports to a writer that it lost its stream, and continues with the others', async () => {
    const { log, open } = setup()
    log.put('a', { first: 1, chunks: ['theirs'], end: null })
    const [a, b] = [open('a'), open('b')]
    a.push('ours')
    b.push('x')
    await settle()
    expect(a.gone).toBe('lost')
    expect(await a.end('error', 'late')).toBe('lost')
    b.push('y')
    await settle()
    expect(log.texts('a')).toEqual(['theirs'])
    expect(log.texts('b')).toEqual(['x', 'y'])
  })

  it('takes the stream from an earlier writer in this process', () => {
    const { open } = setup()
    const first = open('a')
    open('a')
    expect(first.gone).toBe('lost')
  })

  it('parts a flush that the log refuses, and fails only the stream that it refuses', async () => {
    const { log, open } = setup()
    const streams = Array.from({ length: 8 }, (_, index) => open(`s${index}`))
    const append = log.append.bind(log)
    log.append = async (appends) => {
      if (appends.some(({ key }) => key.id === 's5')) throw new TypeError('not this one')
      return append(appends)
    }
    for (const stream of streams) stream.push('1')
    await settle()
    expect(streams.map(({ gone }) => gone)).toEqual([null, null, null, null, null, 'failed', null, null])
    expect(streams.flatMap((_, index) => log.texts(`s${index}`))).toHaveLength(7)
  })

  it('cuts a large backlog into records, one of a stream in each flush, in order', async () => {
    const { log, open } = setup()
    const stream = open('a')
    const release = log.hold('append')
    stream.push('0')
    await settle()
    for (let n = 1; n <= 6; n++) stream.push(`${n}${kilobytes(100)}`)
    void stream.end('done', 'end')
    release()
    await settle()
    expect(log.appends.map((appends) => appends.map(({ chunks }) => chunks.length))).toEqual([[1], [2], [2], [3]])
    expect(log.texts('a').map((text) => text.slice(0, 1))).toEqual(['0', '1', '2', '3', '4', '5', '6', 'e'])
    expect(log.records.get('a')?.map(({ end }) => end)).toEqual([null, null, null, 'done'])
  })

  it('flushes no more than 2,000 records at once', async () => {
    const { log, open } = setup()
    for (let n = 0; n < 4_500; n++) open(`s${n}`).push('1')
    await settle()
    expect(log.appends.map(({ length }) => length)).toEqual([2_000, 2_000, 500])
  })

  it('asks a source to wait at 256 kB of its own, until they are written', async () => {
    const { log, open } = setup()
    const stream = open('a')
    const release = log.hold('append')
    stream.push(kilobytes(255))
    expect(stream.drained()).toBeNull()
    stream.push(kilobytes(1))
    const drained = vi.fn()
    void stream.drained()?.then(drained)
    await settle()
    expect(drained).not.toHaveBeenCalled()
    release()
    await settle()
    expect(drained).toHaveBeenCalledTimes(1)
    expect(stream.drained()).toBeNull()
  })

  it('asks every source to wait at 32 MB of all', async () => {
    const { log, open } = setup()
    const release = log.hold('append')
    const text = kilobytes(255)
    for (let n = 0; n < 128; n++) open(`s${n}`).push(text)
    const small = open('small')
    small.push('1')
    expect(small.drained()).toBeNull()
    open('last').push(text)
    const drained = vi.fn()
    void small.drained()?.then(drained)
    await settle()
    expect(drained).not.toHaveBeenCalled()
    release()
    await settle()
    expect(drained).toHaveBeenCalledTimes(1)
  })

  it('lets a waiting source continue when its stream is gone', async () => {
    const { open } = setup()
    const stream = open('a')
    stream.push(kilobytes(300))
    const drained = stream.drained()
    open('a')
    await drained
    expect(stream.gone).toBe('lost')
  })

  it('rings from the next record on', async () => {
    const { log, writer, open } = setup()
    const stream = open('a')
    stream.push('1')
    await settle()
    writer.ring('a')
    writer.ring('b')
    stream.push('2')
    await settle()
    expect(log.records.get('a')?.map(({ ring }) => ring)).toEqual([false, true])
  })

  it('writes pending records before it closes', async () => {
    const { log, writer, open } = setup()
    const stream = open('a')
    const release = log.hold('append')
    stream.push('1')
    await settle()
    stream.push('2')
    const closed = writer.close()
    release()
    await settle()
    await closed
    expect(log.texts('a')).toEqual(['1', '2'])
    expect(stream.gone).toBe('failed')
    expect(vi.getTimerCount()).toBe(0)
  })

  it('closes within its patience when the log does not answer', async () => {
    const { log, writer, open } = setup()
    log.hold('append')
    open('a').push('1')
    const closed = vi.fn()
    void writer.close().then(closed)
    await vi.advanceTimersByTimeAsync(patienceMs - 1)
    expect(closed).not.toHaveBeenCalled()
    await vi.advanceTimersByTimeAsync(1)
    expect(closed).toHaveBeenCalledTimes(1)
    expect(vi.getTimerCount()).toBe(0)
  })
})
