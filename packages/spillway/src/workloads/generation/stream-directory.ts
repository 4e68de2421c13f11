/** Opens streams once per process: who runs one and who reads it here ask for the same entry at the same time. */
import type { StreamEntry } from '../../index.js'
import type { GenerationDeps } from './deps.js'
import type { Format } from './request.js'

interface Opening {
  id: string
  identity: string
  format: Format
  threadId: string
  watcher: string
  direct: boolean
}

export class StreamDirectory {
  readonly #deps: Pick<GenerationDeps, 'registry' | 'newLog' | 'logOf'>
  readonly #opening = new Map<string, Promise<StreamEntry & { created: boolean }>>()

  constructor(deps: Pick<GenerationDeps, 'registry' | 'newLog' | 'logOf'>) {
    this.#deps = deps
  }

  open(request: Opening): Promise<StreamEntry & { created: boolean }> {
    const known = this.#opening.get(request.id)
    if (known !== undefined) return known
    const entry = this.#open(request).finally(() => this.#opening.delete(request.id))
    this.#opening.set(request.id, entry)
    return entry
  }

  async #open(request: Opening): Promise<StreamEntry & { created: boolean }> {
    const entry = await this.#deps.registry.open({ ...request, log: this.#deps.newLog() })
    if (entry.created) await this.#deps.logOf(entry.log)?.log.marks?.begin(entry.key)
    return entry
  }
}
