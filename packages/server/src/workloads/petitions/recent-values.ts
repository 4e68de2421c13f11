import type { Registry } from 'prom-client'
import { otherLabel, register } from 'spillway/workload'

export interface RecentOptions {
  readonly registry: Registry
  readonly name: string
  readonly help: string
  readonly labelName: string
  readonly type: 'counter' | 'gauge'
  /** How many label values have their own series. */
  readonly recentMax: number
}

/**
 * One number per value of a label with unlimited values: only the most recent values have a series. A counter adds the
 * dropped ones to the series "other", so that the sum stays right; for a gauge "other" shows the last one dropped.
 */
export class RecentValues {
  readonly #options: RecentOptions
  /** Least recent first. */
  readonly #values = new Map<string, number>()
  #other: number | null = null

  constructor(options: RecentOptions) {
    this.#options = options
    const { labelName } = options
    register(options, options.type, () => [
      ...[...this.#values].map(([value, number]) => ({ labels: { [labelName]: value }, value: number })),
      ...(this.#other === null ? [] : [{ labels: { [labelName]: otherLabel }, value: this.#other }]),
    ])
  }

  inc(label: string): void {
    this.set(label, (this.#values.get(label) ?? 0) + 1)
  }

  set(label: string, value: number): void {
    this.#values.delete(label)
    this.#values.set(label, value)
    if (this.#values.size <= this.#options.recentMax) return
    const oldest = this.#values.entries().next()
    if (oldest.done === true) return
    const [dropped, number] = oldest.value
    this.#values.delete(dropped)
    this.#other = this.#options.type === 'counter' ? (this.#other ?? 0) + number : number
  }
}
