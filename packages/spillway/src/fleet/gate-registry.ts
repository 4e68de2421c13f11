/**
 * Capacity gates that are not in the store yet. Submissions wait for them, and the heartbeat retries: an operation that
 * names an unknown gate would fail its whole flush.
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

  /** Registers all pending gates in the store; concurrent calls share one try. Throws the store's error. */
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
        this.#log.warn({ err: fault, gate: name }, 'could not register a capacity gate, retrying')
        throw fault
      }
    }
  }
}
