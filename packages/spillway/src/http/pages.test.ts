import { describe, expect, it } from 'vitest'
import { fitPage, pageById, paginationOf } from './pages.js'

const own = <T>(value: T): T => value
/** As JSON: 4 bytes and its quotes. */
const rows = ['aaaa', 'bbbb', 'cccc']

describe('fitPage', () => {
  it('ends at the limit', () => {
    expect(fitPage(rows, { limit: 2, bytesMax: 1_000 }, own)).toEqual({ items: ['aaaa', 'bbbb'], end: 'bbbb' })
    expect(fitPage(rows, { limit: 3, bytesMax: 1_000 }, own)).toEqual({ items: rows, end: null })
  })

  it('ends at the bytes, the commas counted', () => {
    expect(fitPage(rows, { limit: 9, bytesMax: 6 + 1 + 6 }, own)).toEqual({ items: ['aaaa', 'bbbb'], end: 'bbbb' })
    expect(fitPage(rows, { limit: 9, bytesMax: 6 + 1 + 5 }, own)).toEqual({ items: ['aaaa'], end: 'aaaa' })
    expect(fitPage(rows, { limit: 9, bytesMax: 6 + 7 + 7 }, own)).toEqual({ items: rows, end: null })
  })

  it('counts bytes, not characters', () => {
    expect(fitPage(['ää', 'ää'], { limit: 9, bytesMax: 6 + 1 + 6 }, own).items).toHaveLength(2)
    expect(fitPage(['ää', 'ää'], { limit: 9, bytesMax: 6 + 1 + 5 }, own).items).toHaveLength(1)
  })

  it('continues where rows were withheld', () => {
    expect(fitPage(rows, { limit: 9, bytesMax: 1_000 }, own, true).end).toBe('cccc')
    expect(fitPage([], { limit: 9, bytesMax: 1_000 }, own, true).end).toBeNull()
  })

  it('has one item, however long it is', () => {
    expect(fitPage(rows, { limit: 9, bytesMax: 1 }, own)).toEqual({ items: ['aaaa'], end: 'aaaa' })
    expect(fitPage(['aaaa'], { limit: 9, bytesMax: 1 }, own)).toEqual({ items: ['aaaa'], end: null })
    expect(fitPage([], { limit: 9, bytesMax: 1 }, own)).toEqual({ items: [], end: null })
  })
})

it('an offset continues after the items that were sent', () => {
  expect(paginationOf(10, 5, fitPage(rows, { limit: 10, bytesMax: 6 }, own))).toEqual({
    ...{ limit: 10, offset: 5, nextOffset: 6 },
  })
  expect(paginationOf(3, 5, fitPage(rows, { limit: 3, bytesMax: 99 }, own)).nextOffset).toBeNull()
})

it('a cursor names the last item', () => {
  const page = pageById([{ id: 'a' }, { id: 'b' }], { limit: 1, bytesMax: 99 }, own)
  expect(page).toEqual({ items: [{ id: 'a' }], next_cursor: Buffer.from('a').toString('base64url') })
})
