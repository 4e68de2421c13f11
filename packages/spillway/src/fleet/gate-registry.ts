/**
 * Capacity gates that the store does not know yet. Submissions wait for them, and the heartbeat tries again: an
 * operation that names an unknown gate would fail the whole flush it is in.
 */
export class GateRegistry {
  readonly #waiting = new Map<string, () => Promise<void>>()
  readonly #log: { warn(fields: object, message: string): void }
  #registering: Promise<void> | null = null

  constructor(log: { warn(fields: object, message: string): void }) {
    this.#log = log
  }

  get isComplete(): boolean {
    return this.#waiting.size === 0
  }

  add(name: string, register: () => Promise<void>): void {
    this.#waiting.set(name, register)
  }

  /** Tells the store of all that wait; concurrent calls share one try. Throws what the store threw. */
  register(): Promise<void> {
    this.#registering ??= this.#registerEach().finally(() => {
      this.#registering = null
    })
    return this.#registering
  }

  async #registerEach(): Promise<void> {
    for (const [name, register] of this.#waiting) {
      try {
        await register()
        this.#waiting.delete(name)
      } catch (fault) {
        this.#log.warn({ err: fault, gate: name }, 'a capacity gate could not be registered yet')
        throw fault
      }
    }
  }
}
