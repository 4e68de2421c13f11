import { describe, expect, it } from 'vitest'
import type { Api, Filter } from './api.js'
import { purgeDeadLetters, redriveDeadLetters } from './dead-letters.js'
import { UsageError } from './exit.js'
import type { Terminal } from './terminal.js'

/** A server that holds `held` dead letters, of which the first `stuck` can never be moved. */
function setting(options: { held: number; stuck?: number; dieAgain?: boolean; interactive?: boolean }) {
  let held = options.held
  const stuck = options.stuck ?? 0
  const calls: string[] = []
  const unused = () => Promise.reject(new Error('not to be called'))
  const api: Api = {
    listOperations: unused,
    showOperation: unused,
    changeOperation: unused,
    showDeadLetter: unused,
    listDeadLetters: async () => ({ items: [], next_cursor: null, total: held }),
    redrive: async (which) => {
      calls.push('redrive')
      if ('ids' in which) return { moved: which.ids.length, skipped: 0 }
      // The letters are 0 to held − 1; a cursor is the number of the last one that was offered.
      const from = which.cursor === undefined ? 0 : Number(which.cursor) + 1
      const to = Math.min(from + which.limit, options.held)
      const skipped = Math.max(0, Math.min(stuck, to) - from)
      const moved = to - from - skipped
      if (!options.dieAgain) held -= moved
      return { moved, skipped, next_cursor: to - from < which.limit ? null : String(to - 1) }
    },
    purge: async (_filter: Filter, limit) => {
      calls.push('purge')
      const purged = Math.min(limit, held)
      held -= purged
      return { purged }
    },
  }
  const written = { out: '', err: '' }
  const terminal: Terminal = {
    out: (text) => {
      written.out += text
    },
    err: (text) => {
      written.err += text
    },
    interactive: options.interactive ?? false,
  }
  return { context: { api, terminal, json: false }, calls, written, held: () => held }
}

const all = { ids: [], filter: {}, all: true }

describe('redriveDeadLetters', () => {
  it('moves all in steps and shows how far it is', async () => {
    const { context, calls, written, held } = setting({ held: 450 })
    expect(await redriveDeadLetters(context, all)).toBe(0)
    expect(held()).toBe(0)
    expect(calls).toHaveLength(3)
    expect(written.err).toBe('redriven: 200 of 450\nredriven: 400 of 450\nredriven: 450 of 450\n')
    expect(written.out).toBe('moved 450, skipped 0\n')
  })

  it('rewrites one line on a terminal', async () => {
    const { context, written } = setting({ held: 450, interactive: true })
    await redriveDeadLetters(context, all)
    expect(written.err.split('\r')).toHaveLength(4)
    expect(written.err.match(/\n/gu)).toHaveLength(1)
  })

  it('continues after those that can never be moved', async () => {
    const { context, written } = setting({ held: 500, stuck: 200 })
    await redriveDeadLetters(context, all)
    expect(written.out).toBe('moved 300, skipped 200\n')
  })

  it('ends although the moved ones fail again at once', async () => {
    const { context, written } = setting({ held: 450, dieAgain: true })
    await redriveDeadLetters(context, all)
    expect(written.out).toBe('moved 450, skipped 0\n')
  })

  it('moves ids in steps', async () => {
    const { context, calls } = setting({ held: 1_000 })
    const ids = Array.from({ length: 201 }, (_, index) => String(index))
    await redriveDeadLetters(context, { ids, filter: {}, all: false })
    expect(calls).toHaveLength(2)
  })

  it('does nothing without a selection, or with two', async () => {
    const { context, calls } = setting({ held: 1 })
    await expect(redriveDeadLetters(context, { ids: [], filter: {}, all: false })).rejects.toThrow(UsageError)
    await expect(redriveDeadLetters(context, { ids: ['i'], filter: { queue: 'q' }, all: false })).rejects.toThrow(
      UsageError,
    )
    expect(calls).toEqual([])
  })
})

describe('purgeDeadLetters', () => {
  it('deletes nothing without --yes', async () => {
    const { context, held } = setting({ held: 3 })
    const purge = purgeDeadLetters(context, { filter: { queue: 'q' }, all: false, yes: false })
    await expect(purge).rejects.toThrow('3 dead letters')
    expect(held()).toBe(3)
  })

  it('deletes in steps with it', async () => {
    const { context, calls, written, held } = setting({ held: 250 })
    expect(await purgeDeadLetters(context, { filter: {}, all: true, yes: true })).toBe(0)
    expect(held()).toBe(0)
    expect(calls).toHaveLength(2)
    expect(written.out).toBe('purged 250\n')
  })

  it('wants a filter or --all', async () => {
    const { context } = setting({ held: 3 })
    await expect(purgeDeadLetters(context, { filter: {}, all: false, yes: true })).rejects.toThrow(UsageError)
  })
})
