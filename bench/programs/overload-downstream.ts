/**
 * The one resource behind all doors: 20 slots of 20 ms, first come first served, 1,000 orders a second. When its turn
 * comes an order is worked on, whether or not anybody still waits for it.
 *
 * The plan is made in computed time: an order takes the slot that is free first, for exactly 20 ms. A timer that fires
 * late delays an answer, never the slot, so that the capacity is the same on a busy machine.
 */
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import {
  type DownstreamState,
  downstreamServiceMs,
  downstreamSlots,
  firstNumber,
  numbersMax,
  spreadOf,
} from '../overload-wire.js'

interface Planned {
  readonly number: number
  readonly endsAt: number
  readonly response: ServerResponse
}

const slotFreeAt = new Float64Array(downstreamSlots)
const doneTimes = new Uint8Array(numbersMax)
/** All take equally long, so that they end in the order in which they came. */
let planned: Planned[] = []
let next = 0
let done = 0
let lateMs: number[] = []
let timer: NodeJS.Timeout | undefined

function plan(number: number, response: ServerResponse): void {
  let slot = 0
  for (let i = 1; i < downstreamSlots; i++) if ((slotFreeAt[i] ?? 0) < (slotFreeAt[slot] ?? 0)) slot = i
  const endsAt = Math.max(performance.now(), slotFreeAt[slot] ?? 0) + downstreamServiceMs
  slotFreeAt[slot] = endsAt
  planned.push({ number, endsAt, response })
  arm()
}

function arm(): void {
  const first = planned[next]
  if (timer !== undefined || first === undefined) return
  timer = setTimeout(finishDue, Math.max(0, first.endsAt - performance.now()))
}

function finishDue(): void {
  timer = undefined
  const now = performance.now()
  for (let first = planned[next]; first !== undefined && first.endsAt <= now; first = planned[++next])
    finish(first, now)
  if (next > 1_000) {
    planned = planned.slice(next)
    next = 0
  }
  arm()
}

function finish({ number, endsAt, response }: Planned, now: number): void {
  const index = number - firstNumber
  doneTimes[index] = Math.min(255, (doneTimes[index] ?? 0) + 1)
  done++
  lateMs.push(now - endsAt)
  const body = `{"n":${number},"fulfilled":true}`
  response.writeHead(200, { 'content-type': 'application/json', 'content-length': body.length })
  response.end(body)
}

function fulfil(request: IncomingMessage, response: ServerResponse): void {
  let text = ''
  request.setEncoding('utf8')
  request.on('data', (chunk: string) => {
    text += chunk
  })
  request.on('end', () => {
    const { n } = JSON.parse(text) as { n: number }
    if (!Number.isInteger(n) || n < firstNumber || n >= firstNumber + numbersMax) {
      response.writeHead(400).end('the number of the order is out of range\n')
      return
    }
    plan(n, response)
  })
}

function sendState(response: ServerResponse): void {
  const state: DownstreamState = { inFlight: planned.length - next, done, lateMs: spreadOf(Float64Array.from(lateMs)) }
  lateMs = []
  response.writeHead(200, { 'content-type': 'application/json' }).end(JSON.stringify(state))
}

/** How often each order was done, a byte each. */
function sendDone(url: URL, response: ServerResponse): void {
  const from = Number(url.searchParams.get('first')) - firstNumber
  const bytes = doneTimes.subarray(from, from + Number(url.searchParams.get('count')))
  response.writeHead(200, { 'content-type': 'application/octet-stream' }).end(bytes)
}

const server = createServer((request, response) => {
  const url = new URL(request.url ?? '/', 'http://downstream')
  switch (`${request.method} ${url.pathname}`) {
    case 'POST /fulfil':
      return fulfil(request, response)
    case 'GET /state':
      return sendState(response)
    case 'GET /done':
      return sendDone(url, response)
    default:
      response.writeHead(404).end()
  }
})
server.listen(0, '127.0.0.1', () => {
  console.log(`listening on http://127.0.0.1:${(server.address() as AddressInfo).port}`)
})
process.once('SIGTERM', () => process.exit(0))
