/** Opens streams once per process: the generating side and the reading side ask for the same entry at the same time. */
import { LogFault, type LogName, type StreamEntry } from 'spillway/workload'
import type { GenerationDeps } from './parts.js'
import type { Format } from './request.js'

interface Opening {
  id: string
  identity: string
  format: Format
  threadId: string
  watcher: string
  direct: boolean
  /** Nobody else can have opened it. */
  isNew: boolean
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
    const { isNew, ...stream } = request
    // An existing stream keeps its mark, or stays without it.
    const known = isNew ? null : await this.#deps.registry.find(stream.id)
    if (known !== null) return { ...known, created: false }
    return this.#deps.registry.open({ ...stream, log: await this.#newLog(stream.id) })
  }

  /** A log that does not take the mark would not take chunks either. */
  async #newLog(id: string): Promise<LogName> {
    const { newLog, logOf } = this.#deps
    const name = newLog()
    try {
      await logOf(name)?.log.marks?.begin(id)
      return name
    } catch (fault) {
      if (fault instanceof LogFault) return 'postgres'
      throw fault
    }
  }
}
