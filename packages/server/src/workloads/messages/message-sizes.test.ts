import { expect, it } from 'vitest'
import { MessageSizes } from './message-sizes.js'

const page = 4 * 1_048_576

it('estimates a pop by the largest message of its queue, up to a page; a page where nothing is known', () => {
  const sizes = new MessageSizes(() => 0)
  expect(sizes.estimate('q', 1, page)).toBe(page)
  sizes.saw('q', 1_000)
  sizes.saw('q', 300)
  expect(sizes.largest('q')).toBe(1_000)
  expect(sizes.estimate('q', 10, page)).toBeGreaterThan(10_000)
  expect(sizes.estimate('q', 10, page)).toBeLessThan(20_000)
  expect(sizes.estimate('q', 10_000, page)).toBe(page)
  expect(sizes.estimate('other', 1, page)).toBe(page)
})

it('reserves little for a queue without messages, and never less than the largest one seen', () => {
  const sizes = new MessageSizes(() => 0)
  sizes.foundEmpty('empty')
  expect(sizes.estimate('empty', 1, page)).toBeLessThan(65_536)
  sizes.saw('q', 2_000_000)
  sizes.foundEmpty('q')
  expect(sizes.largest('q')).toBe(2_000_000)
})

it('forgets a large message after two minutes without one', () => {
  let now = 0
  const sizes = new MessageSizes(() => now)
  sizes.saw('q', 2_000_000)
  now = 61_000
  sizes.saw('q', 500)
  expect(sizes.largest('q')).toBe(2_000_000)
  now = 122_000
  sizes.saw('q', 500)
  expect(sizes.largest('q')).toBe(500)
})

it('keeps a bounded number of queues', () => {
  const sizes = new MessageSizes(() => 0)
  for (let n = 0; n < 25_000; n++) sizes.saw(`q${n}`, n)
  expect(sizes.largest('q0')).toBeNull()
  expect(sizes.largest('q24999')).toBe(24_999)
})
