/**
 * How long requests wait before anybody looks at them: those whose bytes come while a turn of the event loop is under way
 * are read in the next one. What a gate measures begins when a request is read, so that a process which takes more than it
 * can do looks calm to its gates while its callers wait for seconds.
 *
 *   in time ──two long turns in a row──► late ──a turn of less than half the limit──► in time
 *
 * One long turn is a hiccup (garbage, a neighbour on the host), two are a backlog. Being late costs nothing to leave: a
 * refused request takes a third of an accepted one, so that a turn of refusals is short. A turn counts from its first
 * request; an idle process has none.
 */
export class Turns {
  readonly #limitMs: number
  readonly #now: () => number
  readonly #atEnd: (end: () => void) => void
  #startedAt: number | null = null
  #longOnes = 0

  constructor(
    limitMs: number,
    now: () => number = () => performance.now(),
    atEnd: (end: () => void) => void = (end) => void setImmediate(end),
  ) {
    this.#limitMs = limitMs
    this.#now = now
    this.#atEnd = atEnd
  }

  /** A request is looked at. */
  note(): void {
    if (this.#startedAt !== null) return
    this.#startedAt = this.#now()
    this.#atEnd(() => this.#end())
  }

  get isLate(): boolean {
    return this.#longOnes >= 2
  }

  #end(): void {
    const lasted = this.#now() - (this.#startedAt ?? 0)
    this.#startedAt = null
    if (lasted > this.#limitMs) this.#longOnes++
    else if (lasted < this.#limitMs / 2 || this.#longOnes < 2) this.#longOnes = 0
  }
}
