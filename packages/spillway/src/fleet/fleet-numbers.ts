import type { Pulse } from '../store/port.js'

/** The figure of a type: slots that are free for it, in processes that run it. */
export const freeSlots = (type: string): string => `free:${type}`

/** Numbers that processes share through their heartbeats: named figures of each process, and operations by type. */
export class FleetNumbers {
  readonly #reported = new Map<string, () => number>()
  #pulse: Pick<Pulse, 'held' | 'running'> = { held: {}, running: {} }

  observe(pulse: Pulse): void {
    this.#pulse = pulse
  }

  /** Reports a figure of this process with each heartbeat. */
  report(name: string, read: () => number): void {
    this.#reported.set(name, read)
  }

  /** For the heartbeat. Operation types cannot start with this prefix. */
  figures(): Record<string, number> {
    return Object.fromEntries([...this.#reported].map(([name, read]) => [`!${name}`, read()]))
  }

  /** The sum of this figure over all live processes, as of the last heartbeat. */
  sumOf(name: string): number {
    return this.figure(name) ?? 0
  }

  /** The same; null: no live process reports it. */
  figure(name: string): number | null {
    return this.#pulse.running[`!${name}`] ?? null
  }

  /** Is any operation held, of any type, as of the last heartbeat? `!dead` counts the dead letters. */
  get holdsAny(): boolean {
    return Object.entries(this.#pulse.held).some(([type, n]) => n > 0 && !type.startsWith('!'))
  }

  /** Operations of a type over all processes, as of the last heartbeat. */
  countsOf(type: string): { pending: number; running: number } {
    const running = this.#pulse.running[type] ?? 0
    return { pending: Math.max(0, (this.#pulse.held[type] ?? 0) - running), running }
  }
}
