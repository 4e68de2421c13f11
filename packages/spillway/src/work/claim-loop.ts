/**
 * Runs operations: those claimed from the queue, and those that a request of this process executes at once.
 *
 * A lane that is held here:
 *
 *   claimed ──► running (one operation after the other) ──► finished ──step──► settled
 *                  │ first long one: marked, the rest is handed back when it is through
 *                  └ retry, not due, slice used up, stopping: finished early, the rest goes back
 *
 * Who may write: only this class calls `step`, and two loops at most are in it at a time. Settling and claiming are one
 * call; finished lanes wait in `#finished` for the next. Crash points: before the step commits nothing has happened
 * (the lease runs out, another process runs it again); after it everything has. A step whose answer is lost is repeated;
 * the leases that it had settled then show as lost, and its new leases are disowned.
 */
import type { Claimed, ClaimRequest } from '../store/port.js'
import type { Outcome } from './attempt.js'
import { type HeldLane, LaneRunner, type LaneRunOptions, sliceMs } from './lane-runner.js'
import { WaitingRoom } from './waiting-room.js'

export interface WorkOptions extends LaneRunOptions {
  /** Lanes that run at once. */
  concurrency: number
  /** The first of the `tallies` parts for its calls; it has `loops` of them. */
  part: number
  /** Operations are long: nothing waits here for a slot, perhaps for minutes, while another process has one free. */
  long: boolean
  /** The call timed out. It may have granted leases that we never heard about. */
  onSilence(): void
  /** The label for claiming lanes that were left to this process. */
  labelOf(type: string): string
  /** A lane was left to others. */
  onLeft(): void
}

/** Maximum number of concurrent calls. */
export const loops = 2
const opsPerClaim = 1_000
const opsPerLane = 500
/** Lanes that may wait here for a free slot, while operations are so short that they wait a few milliseconds at most. */
const prefetchLanesMax = 960
/** Per claim: if there are more, the other loop takes them, and the two take turns at the store. */
const lanesPerClaim = 512
const prefetchMs = 10
/** Deep lanes are cheaper in larger portions: then fewer of them per claim, which also lets the two loops overlap. */
const deepLanes = 100
/** From here on an operation is reported as running, and timeouts and marks are checked. */
const longMs = 50
/** One claim in this many starts at a random level, so that no priority starves. */
const turnEvery = 8
/** How long a second call waits for the first. */
const patientMs = 20
const faultPauseMsMin = 100
const faultPauseMsMax = 2_000
const dueMsMax = 60_000
/** Time for settling operations that were aborted at the deadline of a stop. */
const settleGraceMs = 500

export class ClaimLoop {
  readonly #o: WorkOptions
  readonly #now: () => number
  /** Requests that wait for a slot. */
  readonly room = new WaitingRoom()
  readonly #lanes: LaneRunner
  readonly #running = new Set<HeldLane>()
  readonly #leases = new Map<number, Set<string>>()
  #waiting: HeldLane[] = []
  #finished: HeldLane[] = []
  /** Operations that waited per lane in the last claim. */
  #depth = 1
  #active = 0
  /** When the last call began. */
  #steppedAt = 0
  readonly #freeParts: number[]
  #claiming = false
  #stopped = false
  /** There may be something to claim. */
  #hungry = false
  /** The last claim brought something. */
  #found = false
  /** There is more to claim than fits: the last claim came back full. */
  #backlogged = false
  #dueTimer: NodeJS.Timeout | undefined
  #dueAt = 0
  #tick: NodeJS.Timeout | undefined
  #claims = 0
  /** Lanes that the current claims may bring. */
  #asked = 0
  /** The number of wake-ups. */
  #wakes = 0
  #reserved = 0
  /** Operations that requests execute at once: running ones, and those whose slot is about to become free. */
  #direct = 0
  #directWaiting = 0
  /** Moving average. */
  #acceptMs = 0
  #faultPauseMs = faultPauseMsMin
  #pumpLater: NodeJS.Immediate | undefined
  #idle: (() => void)[] = []

  constructor(options: WorkOptions) {
    this.#o = options
    this.#freeParts = Array.from({ length: loops }, (_, part) => options.part + part)
    this.#lanes = new LaneRunner(options, prefetchMs)
    this.#now = options.now ?? (() => performance.now())
  }

  get runningLanes(): number {
    return this.#running.size
  }

  /** It claims from the queue. */
  get isClaiming(): boolean {
    return this.#claiming
  }

  get freeSlots(): number {
    return this.#o.concurrency - this.#running.size - this.#reserved
  }

  /**
   * Reserves a slot for an operation that a request wants to execute at once; false: it must queue. While lanes wait,
   * requests get half of the slots, so that new requests never starve queued ones.
   */
  reserve(): boolean {
    if (!this.canReserve) return false
    this.#reserved++
    return true
  }

  get canReserve(): boolean {
    const { concurrency } = this.#o
    if (this.#claiming && (this.#backlogged || this.#waiting.length > this.#directWaiting)) {
      return this.freeSlots > 0 && this.#direct + this.#reserved < Math.ceil(concurrency / 2)
    }
    // Slots that become free while the acceptance is written count, too, or they would be idle for that long; unless the
    // queue has something for them.
    const share = this.#found || this.#o.long ? 0 : this.#acceptMs / Math.max(this.runMs, 1)
    const soon = Math.min(concurrency, Math.floor(concurrency * share))
    return this.#running.size + this.#directWaiting + this.#reserved < concurrency + soon
  }

  /** The time from a reservation to its verdict. */
  acceptedIn(ms: number): void {
    this.#acceptMs += (ms - this.#acceptMs) * 0.05
  }

  /** Moving average of an operation's run time. */
  get runMs(): number {
    return this.#lanes.runMs
  }

  /** The same, but null before the first run. */
  get baseMs(): number | null {
    return this.#lanes.hasRun ? this.#lanes.runMs : null
  }

  /** A slot may be free: for a request that waits for one, else for a claimed lane. */
  admit(): void {
    if (this.room.size > 0) this.room.admit(() => this.reserve())
    this.#startWaiting()
  }

  /** It was not executed after all. */
  unreserve(): void {
    this.#reserved--
    this.admit()
  }

  /** Operations that run here now, per type. */
  runningByType(): Record<string, number> {
    return this.#lanes.runningByType()
  }

  /** Start to claim from the queue. Executing at once needs no start. */
  start(): void {
    if (this.#stopped) return
    this.#claiming = true
    this.wake()
  }

  /** There may be work. */
  wake(): void {
    this.#wakes++
    this.#hungry = true
    // Slots that are never free would all go to requests: the next free ones are for the queue, until it has no more.
    if (this.#claiming && this.freeSlots <= 0) this.#backlogged = true
    this.#pump()
  }

  /** A lane becomes due then; the earliest time counts. */
  wakeIn(ms: number): void {
    if (!this.#claiming) return
    const at = this.#now() + Math.min(ms, dueMsMax) + 1
    if (this.#dueTimer !== undefined && this.#dueAt <= at) return
    clearTimeout(this.#dueTimer)
    this.#dueAt = at
    this.#dueTimer = setTimeout(
      () => {
        this.#dueTimer = undefined
        this.wake()
      },
      Math.max(1, at - this.#now()),
    )
    this.#dueTimer.unref()
  }

  /**
   * Runs an operation that `accept` gave to this process, in its reserved slot. Resolves once it is durably settled; null
   * when the lease was lost. `claimCaller`: see HeldLane.
   */
  execute(op: Claimed, claimCaller: HeldLane['claimCaller'] = null): Promise<Outcome | null> {
    return new Promise((resolve) => {
      this.#reserved--
      this.#direct++
      const held = this.#hold([op], this.#now())
      // `accept` has recorded its start already.
      held.marked = true
      held.claimCaller = claimCaller
      held.done = (settled) => resolve(settled ? (held.outcomes[0]?.outcome ?? null) : null)
      // Before the claimed lanes, whose callers do not wait.
      this.#waiting.splice(this.#directWaiting++, 0, ...this.#waiting.splice(-1))
      this.#startWaiting()
    })
  }

  /** Asks a running operation to stop. False: it does not run here. */
  cancel(id: string): boolean {
    return this.#lanes.cancel(id)
  }

  /** The lease is lost: everything this process held belongs to others. */
  loseAll(): void {
    for (const held of this.#running) {
      held.lost = true
      held.attempt?.abort('lease_lost')
    }
    for (const held of [...this.#finished.splice(0), ...this.#giveUpWaiting()]) this.#drop(held)
    this.#leases.clear()
  }

  knownFences(): number[] {
    return [...this.#leases.keys()]
  }

  /** Stops claiming, waits for running operations for at most `deadlineMs`, then gives the rest back. */
  async stop(deadlineMs: number): Promise<void> {
    this.#claiming = false
    clearTimeout(this.#dueTimer)
    // Lanes that have not started go back at once.
    this.#finished.push(...this.#giveUpWaiting())
    this.#pump()
    const timer = setTimeout(() => {
      for (const held of this.#running) held.attempt?.abort('stopping')
    }, deadlineMs)
    let giveUp: NodeJS.Timeout | undefined
    if (this.#running.size > 0 || this.#finished.length > 0 || this.#active > 0) {
      await new Promise<void>((resolve) => {
        this.#idle.push(resolve)
        // A store that does not answer cannot be notified; the lease runs out and others take over.
        giveUp = setTimeout(resolve, deadlineMs + settleGraceMs)
      })
    }
    clearTimeout(giveUp)
    clearTimeout(timer)
    this.#stopped = true
    clearInterval(this.#tick)
  }

  #hold(ops: Claimed[], claimedAt: number): HeldLane {
    const [first] = ops
    if (first === undefined) throw new Error('a lane was claimed without operations')
    const now = this.#now()
    const held: HeldLane = {
      lane: first.lane,
      fence: first.fence,
      from: first.seq - 1,
      ops,
      leaving: [],
      failures: [],
      claimCaller: null,
      outcomes: [],
      retry: null,
      leaveTo: null,
      attempt: null,
      marked: false,
      startedAt: now,
      claimedAt,
      lost: false,
      released: false,
      done: null,
    }
    const lanes = this.#leases.get(first.fence)
    if (lanes === undefined) this.#leases.set(first.fence, new Set([first.lane]))
    else lanes.add(first.lane)
    this.#waiting.push(held)
    return held
  }

  /** Removes waiting lanes that will not start here: all, or those of these leases. */
  #giveUpWaiting(fences?: ReadonlySet<number>): HeldLane[] {
    const given = this.#waiting.filter((held) => fences === undefined || fences.has(held.fence))
    this.#waiting = fences === undefined ? [] : this.#waiting.filter((held) => !fences.has(held.fence))
    const direct = given.filter((held) => held.done !== null).length
    this.#direct -= direct
    this.#directWaiting -= direct
    return given
  }

  /** Requests took the slots that these lanes were claimed for. A long operation could hold them up for minutes. */
  #giveBackClaimed(): void {
    const claimed = this.#waiting.filter((held) => held.done === null)
    if (claimed.length === 0) return
    this.#waiting = this.#waiting.filter((held) => held.done !== null)
    this.#finished.push(...claimed)
  }

  /** Starts waiting lanes while there are free slots, those of requests first. */
  #startWaiting(): void {
    while (this.#directWaiting > 0 ? this.#running.size < this.#o.concurrency : this.freeSlots > 0) {
      const held = this.#waiting.shift()
      if (held === undefined) break
      if (held.done !== null) this.#directWaiting--
      this.#running.add(held)
      held.startedAt = this.#now()
      this.#tick ??= setInterval(() => this.#lookAround(), longMs)
      void this.#runLane(held)
    }
  }

  async #runLane(held: HeldLane): Promise<void> {
    await this.#lanes.run(held, () => this.#claiming)
    this.#running.delete(held)
    if (held.done !== null) this.#direct--
    if (held.lost) this.#drop(held)
    else if (held.released) this.#settledWell(held)
    else this.#finished.push(held)
    this.admit()
    // Lanes that finish in the same turn of the event loop are settled together.
    this.#pumpLater ??= setImmediate(() => {
      this.#pumpLater = undefined
      this.#pump()
    })
  }

  #pump(): void {
    while (this.#active < loops && !this.#stopped) {
      // One call at a time while nothing comes from the queue: lanes that finish in the meantime share the next call, which
      // is cheaper. Two when a call takes long, so that a lane that waits for a lock does not hold up the others.
      if (this.#active > 0 && !this.#found && this.#now() - this.#steppedAt < patientMs) break
      const claim = this.#nextClaim()
      if (this.#finished.length === 0 && claim === null) break
      const settling = this.#finished.splice(0)
      const part = this.#freeParts.pop() ?? this.#o.part
      void this.#step(part, settling, claim).finally(() => this.#freeParts.push(part))
    }
    if (this.#running.size === 0 && this.#finished.length === 0 && this.#active === 0) {
      clearInterval(this.#tick)
      this.#tick = undefined
      for (const resolve of this.#idle.splice(0)) resolve()
    }
  }

  #nextClaim(): ClaimRequest | null {
    if (!this.#claiming || !this.#hungry) return null
    const lanes = Math.min(lanesPerClaim, this.freeSlots + this.#prefetch() - this.#waiting.length - this.#asked)
    if (lanes <= 0) return null
    // The other loop is about to bring some, and will report whether there is more, unless that is known. For deep lanes one
    // claim is enough, and taking them all would leave nothing to claim for the call that settles them.
    const isShallow = this.#depth < opsPerClaim / deepLanes
    if (this.#active > 0 && this.#finished.length === 0 && !(this.#backlogged && isShallow)) return null
    const turn = ++this.#claims % turnEvery === 0 ? 2 + Math.floor(Math.random() * 9) : 1
    const most = Math.max(deepLanes, this.#o.concurrency, Math.ceil(opsPerClaim / this.#depth))
    // No more of a lane than will probably finish within a slice: operations that are handed out can no longer be cancelled.
    const each = Math.max(1, Math.min(opsPerLane, Math.floor(sliceMs / Math.max(this.#lanes.runMs, 0.001))))
    const types: string[] = []
    const together: string[] = []
    const trusted: string[] = []
    for (const [type, handler] of this.#o.handlers) {
      if (handler.ready?.() === false) continue
      types.push(type)
      if (handler.announces !== undefined) types.push(this.#o.labelOf(type))
      if (handler.apply !== undefined) together.push(type)
      if (handler.together !== undefined) trusted.push(type)
    }
    return { lanes: Math.min(lanes, most), budget: opsPerClaim, each, turn, types, together, trusted }
  }

  /** None while operations are slow: another process could run the lanes that would wait here. */
  #prefetch(): number {
    const perSlot = prefetchMs / Math.max(this.#lanes.runMs, 0.01)
    return perSlot < 2 || this.#o.long ? 0 : Math.min(prefetchLanesMax, Math.floor(perSlot) * this.#o.concurrency)
  }

  async #step(part: number, settling: HeldLane[], claim: ClaimRequest | null): Promise<void> {
    this.#active++
    const steppedAt = this.#now()
    this.#steppedAt = steppedAt
    const asked = claim?.lanes ?? 0
    const wakes = this.#wakes
    this.#asked += asked
    const { store, log } = this.#o
    try {
      const settlements = settling.map(({ fence, lane, from, leaving, failures, retry, leaveTo }) => ({
        fence,
        lane,
        from,
        leaving,
        failures,
        retry,
        leaveTo,
        release: true,
      }))
      const { lost, claimed, depth } = await store.step(this.#o.worker(), part, settlements, claim)
      this.#faultPauseMs = faultPauseMsMin
      if (lost.length > 0) {
        this.#settledLost(settling, new Set(lost))
      } else {
        for (const held of settling) this.#settledWell(held)
        if (claim !== null) this.#begin(claimed, claim, depth, { wakes, steppedAt })
      }
    } catch (fault) {
      this.#o.onSilence()
      this.#finished.unshift(...settling)
      log.warn({ err: fault, lanes: settling.length }, 'settling failed, retrying')
      await new Promise((resolve) => setTimeout(resolve, this.#faultPauseMs))
      this.#faultPauseMs = Math.min(faultPauseMsMax, this.#faultPauseMs * 2)
    } finally {
      this.#active--
      this.#asked -= asked
      this.#pump()
    }
  }

  #begin(
    claimed: Claimed[],
    claim: ClaimRequest,
    depth: number,
    { wakes, steppedAt }: { wakes: number; steppedAt: number },
  ): void {
    let lanes = 0
    for (let start = 0; start < claimed.length; ) {
      let end = start + 1
      while (end < claimed.length && claimed[end]?.lane === claimed[start]?.lane) end++
      this.#hold(claimed.slice(start, end), steppedAt)
      lanes++
      start = end
    }
    if (lanes > 0) this.#depth = Math.max(depth, claimed.length) / lanes
    this.#startWaiting()
    if (this.#o.long) this.#giveBackClaimed()
    // Fewer than requested: that was all, unless there was a wake-up in the meantime. The next wake-up, or the pulse,
    // reports more.
    this.#found = lanes > 0
    this.#backlogged = lanes >= claim.lanes
    this.#hungry = this.#backlogged || (claim.turn > 1 && lanes > 0) || wakes !== this.#wakes
    this.admit()
  }

  #settledWell(held: HeldLane): void {
    const lanes = this.#leases.get(held.fence)
    lanes?.delete(held.lane)
    if (lanes?.size === 0) this.#leases.delete(held.fence)
    for (const { op, outcome } of held.outcomes) this.#o.onSettled(op, outcome)
    // The lane may have more, or its retry is due soon.
    if (held.leaveTo !== null) this.#o.onLeft()
    else if (held.retry !== null) this.wakeIn(held.retry.delayMs)
    else this.#hungry = true
    if (this.#o.handlers.get(held.ops[0]?.type ?? '')?.takesTurns === true) this.#turnPassed()
    held.done?.(true)
  }

  /** The next operation of the key is ready: for us, or for another process if we cannot take it. */
  #turnPassed(): void {
    this.#hungry = true
    if (!this.#claiming || this.freeSlots <= 0) this.#o.onLeft()
  }

  #settledLost(settling: readonly HeldLane[], lost: ReadonlySet<number>): void {
    for (const held of settling) {
      if (lost.has(held.fence)) this.#drop(held)
      else this.#finished.push(held)
    }
    for (const held of this.#giveUpWaiting(lost)) this.#drop(held)
    for (const fence of lost) {
      this.#leases.delete(fence)
      for (const held of this.#running) {
        if (held.fence !== fence) continue
        held.lost = true
        held.attempt?.abort('lease_lost')
      }
    }
  }

  #drop(held: HeldLane): void {
    const lanes = this.#leases.get(held.fence)
    lanes?.delete(held.lane)
    if (lanes?.size === 0) this.#leases.delete(held.fence)
    for (const { op } of held.outcomes) this.#o.onAttempt(op.type, 'lease_lost', 0)
    held.done?.(false)
  }

  /** Every 50 ms while something runs: checks timeouts, and reports long runs. */
  #lookAround(): void {
    const now = this.#now()
    const started: { fence: number; lane: string; seq: number; startedMsAgo: number }[] = []
    for (const held of this.#running) {
      const { attempt } = held
      if (attempt === null) continue
      if (now >= attempt.deadline) attempt.abort('timeout')
      if (held.marked || now - attempt.startedAt < longMs) continue
      held.marked = true
      // Later operations of the lane go back: they can be cancelled, and are not charged if we die.
      held.ops.length = held.ops.findIndex((op) => op.seq === attempt.op.seq) + 1
      started.push({ fence: held.fence, lane: held.lane, seq: attempt.op.seq, startedMsAgo: now - attempt.startedAt })
    }
    if (this.#finished.length > 0) this.#pump()
    if (started.length === 0) return
    this.#o.store.mark(this.#o.worker(), started).catch((fault: unknown) => {
      this.#o.log.warn({ err: fault, operations: started.length }, 'could not record that operations are running')
    })
  }
}
