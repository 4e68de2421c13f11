import { describe, expect, it } from 'vitest'
import { nextNumbers, payloadText, pushBody, type Shape } from './message-body.js'

interface Item {
  queue: string
  partition: string
  transactionId?: string
  payload: { n: number }
}

const shape: Shape = { queue: 'q', partitions: 20, items: 10, lanes: 5 }
const itemsOf = (body: string): Item[] => (JSON.parse(body) as { items: Item[] }).items

describe('pushBody', () => {
  it('makes payloads of 256 bytes', () => {
    expect(Buffer.byteLength(payloadText(nextNumbers()))).toBe(256)
  })

  it('numbers the messages of a load one after the other', () => {
    const first = nextNumbers()
    const numbers = [0, 1].flatMap((request) =>
      itemsOf(pushBody(shape, { first }, request)).map(({ payload }) => payload.n),
    )
    expect(numbers).toEqual(Array.from({ length: 20 }, (_, i) => first + i))
  })

  it('spreads a request over as many partitions as wanted, and the next one over the next', () => {
    const partitionsOf = (request: number): string[] => [
      ...new Set(itemsOf(pushBody(shape, { first: nextNumbers() }, request)).map(({ partition }) => partition)),
    ]
    expect(partitionsOf(0)).toEqual(['p00000', 'p00001', 'p00002', 'p00003', 'p00004'])
    expect(partitionsOf(3)).toEqual(['p00015', 'p00016', 'p00017', 'p00018', 'p00019'])
    expect(partitionsOf(4)).toEqual(partitionsOf(0))
  })

  it('has transaction ids only where a request may be sent again', () => {
    const first = nextNumbers()
    expect(itemsOf(pushBody(shape, { first }, 0))[0]?.transactionId).toBeUndefined()
    expect(itemsOf(pushBody(shape, { first, named: true }, 0))[0]?.transactionId).toBe(String(first))
  })
})
