import type { Pulse } from '../store/port.js'

/** What all processes know of each other by their heartbeats: numbers that each tells, and operations by type. */
export class FleetNumbers {
  /** What this process tells, by name. */
  readonly tells = new Map<string, () => number>()
  #pulse: Pick<Pulse, 'held' | 'running'> = { held: {}, running: {} }

  observe(pulse: Pulse): void {
    this.#pulse = pulse
  }

  /** Names that begin like this are no operation types. */
  told(): Record<string, number> {
    return Object.fromEntries([...this.tells].map(([name, read]) => [`!${name}`, read()]))
  }

  /** What all processes that live tell under this name, together, as of the last heartbeat. */
  sumOf(name: string): number {
    return this.#pulse.running[`!${name}`] ?? 0
  }

  /** Operations of a type over all processes, as of the last heartbeat. */
  countsOf(type: string): { pending: number; running: number } {
    const running = this.#pulse.running[type] ?? 0
    return { pending: Math.max(0, (this.#pulse.held[type] ?? 0) - running), running }
  }
}
