/** The messages of a load: 256 bytes of JSON, each with a number of its own. messages.lua makes the same. */

const payloadBytes = 256
/** Numbers have nine digits, so that all messages are of one length, and fit a small integer. */
const firstNumber = 100_000_000
const head = (n: number): string => `{"n":${n},"pad":"`
const tail = '"}'
export const pad = 'x'.repeat(payloadBytes - head(firstNumber).length - tail.length)

export const pushPath = '/api/v1/push'

/** How the messages of a load are spread. */
export interface Shape {
  readonly queue: string
  readonly partitions: number
  /** Of one request. */
  readonly items: number
  /** Partitions that one request names; they rotate. */
  readonly lanes: number
}

/** Partition of an item: the next `lanes` ones with each request. */
const partitionOf = ({ partitions, items, lanes }: Shape, request: number, item: number): string =>
  `p${String((request * lanes + Math.floor((item * lanes) / items)) % partitions).padStart(5, '0')}`

export const payloadText = (n: number): string => `${head(n)}${pad}${tail}`

/** `named`: with transaction ids, so that it may be sent again. */
export interface Numbering {
  readonly first: number
  readonly named?: boolean
}

/** The body of a load's request; its items are numbered from `first` + request × items on. */
export function pushBody(shape: Shape, { first, named = false }: Numbering, request: number): string {
  const texts: string[] = []
  for (let item = 0; item < shape.items; item++) {
    const n = first + request * shape.items + item
    const name = named ? `"transactionId":"${n}",` : ''
    const partition = partitionOf(shape, request, item)
    texts.push(`{"queue":"${shape.queue}","partition":"${partition}",${name}"payload":${payloadText(n)}}`)
  }
  return `{"items":[${texts.join()}]}`
}

const numbersOfLoad = 4_000_000
let loads = 0

/** The first number of a load: no other load of this section has any of its numbers. */
export function nextNumbers(): number {
  const first = firstNumber + loads * numbersOfLoad
  if (first + numbersOfLoad > firstNumber * 10) throw new Error('more loads than there are numbers for')
  loads += 1
  return first
}
