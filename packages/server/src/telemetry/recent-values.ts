import type { Registry } from '@prometheus-io/client'
import { otherLabel, register } from 'spillway/workload'

export interface RecentOptions {
  readonly registry: Registry
  readonly name: string
  readonly help: string
  readonly labelName: string
  readonly type: 'counter' | 'gauge'
  /** Label values that have a series of their own. */
  readonly recentMax: number
}

/**
 * One number per value of a label that may take any number of values: only the most recent ones have a series. What a
 * counter loses that way is added to the series "other", so that the sum stays right; of a gauge "other" shows the last
 * one that was dropped.
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
