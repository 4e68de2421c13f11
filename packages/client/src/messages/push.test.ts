import { expect, it } from 'vitest'
import { placeOf } from './address.js'
import { itemsOf } from './push.js'

it.each([
  ['orders', { queue: 'orders' }],
  ['orders/eu', { queue: 'orders', partition: 'eu' }],
  ['orders/eu/1', { queue: 'orders', partition: 'eu/1' }],
  [
    { queue: 'a/b', partition: 'c' },
    { queue: 'a/b', partition: 'c' },
  ],
])('the address %j is %j', (address, place) => {
  expect(placeOf(address)).toEqual(place)
})

it.each([
  [{ id: 1 }, [{ payload: { id: 1 } }]],
  [
    [1, null],
    [{ payload: 1 }, { payload: null }],
  ],
  [[{ payload: 1, transactionId: 't' }], [{ payload: 1, transactionId: 't' }]],
  [[{ payload: 1, other: 2 }], [{ payload: { payload: 1, other: 2 } }]],
])('the messages %j are the items %j', (messages, items) => {
  expect(itemsOf('q', messages)).toEqual(items.map((item) => ({ ...item, queue: 'q' })))
})
