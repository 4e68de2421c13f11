import { formatDuration } from './number-format.js'

export interface Planned {
  readonly name: string
  readonly seconds: number
}

/** Lines like `[1:05, about 3:20 left] accept: round 2 of 5`. The clock is given, in milliseconds. */
export class Progress {
  readonly #plan: readonly Planned[]
  readonly #now: () => number
  readonly #write: (line: string) => void
  readonly #startedAt: number
  #current = -1
  #currentAt: number

  constructor(plan: readonly Planned[], write: (line: string) => void, now: () => number = () => performance.now()) {
    this.#plan = plan
    this.#write = write
    this.#now = now
    this.#startedAt = now()
    this.#currentAt = this.#startedAt
  }

  /** The next section begins. */
  begin(name: string): void {
    this.#current = this.#plan.findIndex((planned) => planned.name === name)
    this.#currentAt = this.#now()
  }

  say(text: string): void {
    const name = this.#plan[this.#current]?.name
    const elapsed = formatDuration((this.#now() - this.#startedAt) / 1_000)
    const left = formatDuration(this.secondsLeft())
    this.#write(`[${elapsed}, about ${left} left] ${name === undefined ? '' : `${name}: `}${text}`)
  }

  /** What is planned for later, and what is left of the current one: never less than nothing. */
  secondsLeft(): number {
    const spent = (this.#now() - this.#currentAt) / 1_000
    return this.#plan.reduce((sum, { seconds }, index) => {
      if (index < this.#current) return sum
      return sum + (index === this.#current ? Math.max(0, seconds - spent) : seconds)
    }, 0)
  }
}
