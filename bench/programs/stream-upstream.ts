/**
 * The model of the generation section: any number of streams at a set pace, each token in a write of its own, at so little cost
 * that it is not what is measured. One turn of a wheel serves all streams of a pace; they are spread evenly over it.
 *
 * GET /state: streams under way, and by how much tokens were sent late.
 */
import { createServer, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { percentile } from '../statistics.js'
import { endBlocks, firstBlock, type StreamScript, scriptIn, sharedClockMs, tokenBlock } from './stream-tokens.js'

const lateKept = 200_000

class Feed {
  readonly #response: ServerResponse
  readonly #tokens: number
  #sent = 0
  isOver = false

  constructor(response: ServerResponse, tokens: number) {
    this.#response = response
    this.#tokens = tokens
    response.once('close', () => {
      this.isOver = true
    })
  }

  /** False: the reader is too slow, as of `write`. */
  sendToken(): boolean {
    if (this.isOver) return true
    this.#sent += 1
    const isTaken = this.#response.write(tokenBlock(this.#sent, sharedClockMs()))
    if (this.#sent === this.#tokens) {
      this.#response.end(endBlocks)
      this.isOver = true
    }
    return isTaken
  }

  drained(then: () => void): void {
    this.#response.once('drain', then)
  }
}

/** One slot for each millisecond between two tokens of a stream. */
class Wheel {
  readonly #slots: Set<Feed>[]
  readonly #late: number[]
  #size = 0
  #added = 0
  #at = 0
  #startMs = 0

  constructor(every: number, late: number[]) {
    this.#slots = Array.from({ length: every }, () => new Set())
    this.#late = late
  }

  add(feed: Feed): void {
    // By a step that has no divisor in common with the usual paces, so that few streams are spread too.
    this.#slots[(this.#added * 7 + this.#at + 1) % this.#slots.length]?.add(feed)
    this.#added += 1
    this.#size += 1
    if (this.#size > 1) return
    this.#startMs = performance.now() - this.#at
    setTimeout(this.#turn, 1)
  }

  readonly #turn = (): void => {
    const now = performance.now() - this.#startMs
    for (; this.#at + 1 <= now; this.#at++) {
      const slot = this.#slots[(this.#at + 1) % this.#slots.length] ?? new Set()
      for (const feed of slot) {
        // A slow reader does not skip a turn, and a real model would not wait for it: its tokens arrive late.
        if (!feed.isOver) feed.sendToken()
        if (this.#late.length < lateKept) this.#late.push(performance.now() - this.#startMs - this.#at - 1)
        if (!feed.isOver) continue
        slot.delete(feed)
        this.#size -= 1
      }
    }
    if (this.#size > 0) setTimeout(this.#turn, 1)
  }
}

const wheels = new Map<number, Wheel>()
const late: number[] = []
let open = 0

/** A token of each stream in turn: setImmediate lets all others have theirs. */
function hurry(feed: Feed): void {
  if (feed.isOver) return
  if (feed.sendToken()) setImmediate(hurry, feed)
  else feed.drained(() => hurry(feed))
}

function begin(response: ServerResponse, { tokens, every }: StreamScript): void {
  response.socket?.setNoDelay(true)
  response.writeHead(200, { 'content-type': 'text/event-stream; charset=utf-8', 'cache-control': 'no-cache' })
  response.write(firstBlock)
  open += 1
  response.once('close', () => {
    open -= 1
  })
  if (tokens === 0) return
  const feed = new Feed(response, tokens)
  if (every === 0) {
    hurry(feed)
    return
  }
  const wheel = wheels.get(every) ?? new Wheel(every, late)
  wheels.set(every, wheel)
  wheel.add(feed)
}

const server = createServer((request, response) => {
  if (request.method === 'GET') {
    const lateP99Ms = late.length === 0 ? 0 : percentile(late, 0.99)
    if (request.url?.endsWith('?forget') === true) late.length = 0
    response.writeHead(200, { 'content-type': 'application/json' }).end(JSON.stringify({ open, lateP99Ms }))
    return
  }
  let body = ''
  request.setEncoding('utf8').on('data', (text: string) => {
    body += text
  })
  request.on('end', () => begin(response, scriptIn(body)))
})
server.requestTimeout = 0
server.listen(0, '127.0.0.1', 4_096, () => {
  console.log(`LISTENS http://127.0.0.1:${(server.address() as AddressInfo).port}`)
})
process.once('SIGTERM', () => process.exit(0))
