import { describe, expect, it } from 'vitest'
import { BufferBudget, type BufferKind, type Hold } from './buffer-budget.js'

const MiB = 1_048_576
/** Reserve 8 MiB, share of an identity 8 MiB, the rest 56 MiB. */
const total = 64 * MiB
const never = () => new AbortController().signal

function budgetOf(options: { waitMs?: number } = {}) {
  const refused: BufferKind[] = []
  const budget = new BufferBudget(total, { onRefused: (kind) => refused.push(kind), ...options })
  return { budget, refused }
}

/** As many as it gives, up to a bound. */
function takeAll(take: () => Hold | null, max = 10_000): Hold[] {
  const holds: Hold[] = []
  while (holds.length < max) {
    const hold = take()
    if (hold === null) break
    holds.push(hold)
  }
  return holds
}

describe('takes', () => {
  it('gives each identity an eighth, and all together the budget without the reserve', () => {
    const { budget, refused } = budgetOf()
    expect(takeAll(() => budget.take('in', 'a', MiB))).toHaveLength(8)
    expect(takeAll(() => budget.take('out', 'b', MiB))).toHaveLength(8)
    for (const identity of ['c', 'd', 'e', 'f', 'g']) {
      expect(takeAll(() => budget.take('out', identity, MiB))).toHaveLength(8)
    }
    expect(budget.take('in', 'h', MiB)).toBeNull()
    expect(budget.held('in') + budget.held('out')).toBe(56 * MiB)
    expect(refused).toEqual(['in', 'out', 'out', 'out', 'out', 'out', 'out', 'in'])
  })

  it('keeps the reserve for small ones and acks', () => {
    const { budget } = budgetOf()
    for (const identity of ['a', 'b', 'c', 'd', 'e', 'f', 'g']) takeAll(() => budget.take('out', identity, MiB))
    expect(budget.take('in', 'a', 65_537)).toBeNull()
    expect(budget.take('in', 'a', 65_536)).not.toBeNull()
    expect(budget.take('in', 'a', MiB, true)).not.toBeNull()
    expect(budget.held('in')).toBe(MiB + 65_536)
  })

  it('gives bodies five eighths at most, also as they grow, and answers the rest', () => {
    const { budget } = budgetOf()
    for (const identity of ['a', 'b', 'c', 'd']) {
      expect(takeAll(() => budget.take('in', identity, MiB))).toHaveLength(8)
    }
    const chunked = budget.take('in', 'f', 0)
    expect(chunked?.growTo(7 * MiB)).toBe(true)
    expect(budget.take('in', 'g', MiB)).not.toBeNull()
    expect(budget.take('in', 'g', MiB)).toBeNull()
    expect(chunked?.growTo(8 * MiB)).toBe(false)
    expect(budget.held('in')).toBe(40 * MiB)
    expect(takeAll(() => budget.take('out', 'g', MiB))).toHaveLength(7)
    chunked?.release()
    expect(budget.take('in', 'h', MiB)).not.toBeNull()
  })

  it('does not let one identity use up the reserve', () => {
    const { budget } = budgetOf()
    // Half of the reserve, an eighth of the other half and more, and its share of the rest.
    const small = takeAll(() => budget.take('in', 'greedy', 65_536))
    expect(small.length * 65_536).toBe((4 + 1 + 8) * MiB)
    const acks = takeAll(() => budget.take('in', 'greedy', MiB, true))
    expect(acks).toHaveLength(0)
    expect(takeAll(() => budget.take('in', 'other', 65_536), 16)).toHaveLength(16)
    expect(budget.take('in', 'other', MiB, true)).not.toBeNull()
    for (const hold of small) hold.release()
    expect(takeAll(() => budget.take('in', 'greedy', MiB, true)).length).toBeGreaterThan(0)
  })

  it('releases once, whatever is called', () => {
    const { budget } = budgetOf()
    const first = budget.take('in', 'a', 3 * MiB)
    const second = budget.take('in', 'a', 3 * MiB)
    first?.release()
    first?.release()
    first?.settle(MiB)
    expect(first?.growTo(MiB)).toBe(false)
    expect(budget.held('in')).toBe(3 * MiB)
    second?.release()
    expect(budget.held('in')).toBe(0)
    expect(takeAll(() => budget.take('in', 'a', MiB))).toHaveLength(8)
  })

  it('grows from the reserve into the share, and stays as it was where there is no room', () => {
    const { budget } = budgetOf()
    const growing = budget.take('in', 'a', 0)
    expect(growing?.growTo(65_536)).toBe(true)
    expect(growing?.growTo(4 * MiB)).toBe(true)
    budget.take('in', 'a', 3 * MiB)
    expect(growing?.growTo(6 * MiB)).toBe(false)
    expect(growing?.bytes).toBe(4 * MiB)
    expect(growing?.growTo(5 * MiB)).toBe(true)
    expect(budget.held('in')).toBe(8 * MiB)
    growing?.release()
    expect(budget.held('in')).toBe(3 * MiB)
  })

  it('takes one that is larger than the share only alone', () => {
    const { budget } = budgetOf()
    const large = budget.take('out', 'a', 12 * MiB)
    expect(large).not.toBeNull()
    expect(budget.take('out', 'a', MiB)).toBeNull()
    large?.release()
    expect(budget.take('out', 'a', MiB)).not.toBeNull()
    expect(budget.take('out', 'a', 12 * MiB)).toBeNull()
  })

  it('counts answers that must be sent beyond all bounds, against later ones', () => {
    const { budget } = budgetOf()
    takeAll(() => budget.take('in', 'a', MiB))
    const owed = budget.takeAnyway('out', 'a', 4 * MiB)
    expect(budget.held('out')).toBe(4 * MiB)
    expect(budget.take('in', 'a', MiB)).toBeNull()
    owed.release()
    expect(budget.held('out')).toBe(0)
  })

  it('keeps nothing of an identity that holds nothing', async () => {
    const { budget } = budgetOf()
    const held = [
      budget.take('in', 'a', MiB),
      budget.takeAnyway('out', 'a', 9 * MiB),
      await budget.reserve('b', () => MiB, never),
      ...takeAll(() => budget.take('in', 'c', 65_536)),
    ]
    for (const hold of held) hold?.release()
    // A full round of others fits again.
    for (const identity of ['a', 'b', 'c', 'd', 'e', 'f', 'g']) {
      expect(takeAll(() => budget.take('out', identity, MiB))).toHaveLength(8)
    }
  })
})

describe('reservations', () => {
  const page = () => 2 * MiB

  it('use half of a share, so that bodies find room, and further ones wait in order', async () => {
    const { budget, refused } = budgetOf()
    const first = await budget.reserve('a', page, never)
    const second = await budget.reserve('a', page, never)
    const order: string[] = []
    const noted = async (name: string, hold: Hold | null | Promise<Hold | null>): Promise<Hold | null> => {
      const got = await hold
      order.push(name)
      return got
    }
    const third = noted('third', budget.reserve('a', page, never))
    // It would fit, but came later.
    const fourth = noted(
      'fourth',
      budget.reserve('a', () => 100_000, never),
    )
    expect(budget.take('in', 'a', 4 * MiB)).not.toBeNull()
    expect(await budget.reserve('b', page, never)).not.toBeNull()
    expect(order).toEqual([])
    first?.settle(1_000)
    expect((await third)?.bytes).toBe(2 * MiB)
    second?.release()
    expect((await fourth)?.bytes).toBe(100_000)
    expect(order).toEqual(['third', 'fourth'])
    expect(refused).toEqual([])
    expect(budget.held('out')).toBe(1_000 + 2 * MiB + 100_000 + 2 * MiB)
  })

  it('are refused at once where waiting would not help', async () => {
    const { budget, refused } = budgetOf()
    takeAll(() => budget.take('out', 'a', MiB))
    expect(budget.reserve('a', page, never)).toBeNull()
    expect(refused).toEqual(['out', 'out'])
    expect(await budget.reserve('b', page, never)).not.toBeNull()
  })

  it('are refused while they wait, once the pending space is held for long', async () => {
    const { budget } = budgetOf()
    const reserved = [await budget.reserve('a', page, never), await budget.reserve('a', page, never)]
    const waiting = budget.reserve('a', page, never)
    for (const hold of reserved) hold?.settle(4 * MiB)
    expect(await waiting).toBeNull()
  })

  it('are refused after a while, and leave the line with their client', async () => {
    const { budget, refused } = budgetOf({ waitMs: 30 })
    const held = [await budget.reserve('a', page, never), await budget.reserve('a', page, never)]
    const leaving = new AbortController()
    const left = budget.reserve('a', page, () => leaving.signal)
    const late = budget.reserve('a', page, never)
    leaving.abort()
    expect(await left).toBeNull()
    expect(refused).toEqual([])
    expect(await late).toBeNull()
    expect(refused).toEqual(['out'])
    for (const hold of held) hold?.release()
    expect(budget.held('out')).toBe(0)
    expect(await budget.reserve('a', page, never)).not.toBeNull()
  })

  it('ask for their estimate again when it is their turn', async () => {
    const { budget } = budgetOf()
    const held = [await budget.reserve('a', page, never), await budget.reserve('a', page, never)]
    let bytes = 2 * MiB
    const waiting = Array.from({ length: 50 }, () =>
      budget.reserve(
        'a',
        () => bytes,
        () => new AbortController().signal,
      ),
    )
    bytes = 1_000
    held[0]?.settle(0)
    const got = await Promise.all(waiting)
    expect(got.map((hold) => hold?.bytes)).toEqual(Array(50).fill(1_000))
  })

  it('small ones use the reserve, and what large ones would be given only when that is full', async () => {
    const { budget } = budgetOf()
    const small = takeAll(() => budget.take('in', 'x', 65_536))
    const hold = await budget.reserve('a', () => 65_536, never)
    expect(hold?.bytes).toBe(65_536)
    hold?.settle(70_000)
    expect(budget.held('out')).toBe(70_000)
    hold?.release()
    for (const each of small) each.release()
    expect(budget.held('in') + budget.held('out')).toBe(0)
  })
})
