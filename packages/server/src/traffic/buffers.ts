/** The buffer budget at the sockets: what each request holds, from the first byte of its body to the last of its answer. */
import type { IncomingMessage, ServerResponse } from 'node:http'
import type { Socket } from 'node:net'
import type { Problem } from 'spillway/workload'
import { BufferBudget, type BufferKind, type Hold } from './buffer-budget.js'

/**
 * Smaller answers are not counted: the kernel takes them at once (its buffers are not smaller), and there are at most as
 * many as connections.
 */
const uncountedBytes = 4_096
/** No character takes more in UTF-8. */
const bytesPerCharacterMax = 3

/** The holds of a request are stored on its response, under symbols. */
const bodyKey = Symbol('spillway.body')
const answerKey = Symbol('spillway.answer')
type Holding = { [bodyKey]?: Hold; [answerKey]?: Hold }

export interface BuffersOptions {
  bytesMax: number
  onRefused?: (kind: BufferKind) => void
}

export class Buffers {
  readonly budget: BufferBudget
  readonly noRoom: Problem = {
    code: 'overloaded',
    detail: 'The space for request bodies and answers is used up. Try again later.',
    retryAfterMs: 2_000,
  }
  /** Holds of answers that wait behind others on their connection: Node does not emit 'close' for them. */
  readonly #behind = new WeakMap<Socket, Set<Hold>>()

  constructor({ bytesMax, onRefused }: BuffersOptions) {
    this.budget = new BufferBudget(bytesMax, onRefused === undefined ? {} : { onRefused })
  }

  /** Held until the answer is sent or the connection is closed. Null: no space. */
  holdBody(
    request: IncomingMessage,
    response: ServerResponse,
    identity: string,
    bytes: number,
    isAck: boolean,
  ): Hold | null {
    const hold = this.budget.take('in', identity, bytes, isAck)
    if (hold !== null) this.#bind(bodyKey, request, response, hold)
    return hold
  }

  /** Binds space reserved with `budget.reserve`. Call before the answer is sent. */
  bindReserved(request: IncomingMessage, response: ServerResponse, hold: Hold): void {
    this.#bind(answerKey, request, response, hold)
  }

  /** Call before an answer is sent. False: no space. `isOwed`: sent however full the budget is, because its work is done. */
  holdAnswer(
    request: IncomingMessage,
    response: ServerResponse,
    identity: () => string,
    payload: unknown,
    isOwed: boolean,
  ): boolean {
    const reserved = (response as Holding)[answerKey]
    const bytes = bytesOf(payload)
    if (reserved !== undefined) {
      if (bytes <= uncountedBytes) reserved.release()
      else reserved.settle(bytes)
      return true
    }
    if (bytes <= uncountedBytes) return true
    const { budget } = this
    const hold = isOwed ? budget.takeAnyway('out', identity(), bytes) : budget.take('out', identity(), bytes)
    if (hold !== null) this.#bind(answerKey, request, response, hold)
    return hold !== null
  }

  #bind(key: keyof Holding, request: IncomingMessage, response: ServerResponse, hold: Hold): void {
    if (response.closed || request.socket.destroyed) return void hold.release()
    const holding = response as Holding
    if (holding[bodyKey] === undefined && holding[answerKey] === undefined) response.once('close', releaseAll)
    holding[key] = hold
    if (response.socket === null) this.#behindOthers(request.socket, response, hold)
  }

  #behindOthers(socket: Socket, response: ServerResponse, hold: Hold): void {
    let holds = this.#behind.get(socket)
    if (holds === undefined) {
      const all = new Set<Hold>()
      socket.once('close', () => {
        for (const each of all) each.release()
      })
      this.#behind.set(socket, all)
      holds = all
    }
    const own = holds.add(hold)
    response.once('close', () => own.delete(hold))
  }
}

/** The body is no longer needed, although its answer will take a while. */
export function releaseBody(response: ServerResponse): void {
  ;(response as Holding)[bodyKey]?.release()
}

function releaseAll(this: ServerResponse): void {
  const { [bodyKey]: body, [answerKey]: answer } = this as Holding
  body?.release()
  answer?.release()
}

function bytesOf(payload: unknown): number {
  if (typeof payload === 'string') {
    return payload.length * bytesPerCharacterMax <= uncountedBytes ? payload.length : Buffer.byteLength(payload)
  }
  return payload instanceof Uint8Array ? payload.byteLength : 0
}
