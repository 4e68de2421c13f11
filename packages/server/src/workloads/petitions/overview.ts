/**
 * Background reads of an instance, so that no request has to make them: the counts for the gauges, the overflows witnessed
 * since it started (each is logged once), and the gate's state if the intake's pulse, once a second, is too slow for
 * PETITION_QUEUE_CACHE_TTL. The commit that witnesses an overflow triggers a read at once; if that hint is lost, the next
 * read finds it.
 */
import { type PetitionState, petitionStates } from '@spillway/protocol/wire'
import type { Intake } from 'spillway/workload'
import type { PetitionsOptions } from './options.js'
import type { OverflowEvent, Petitions } from './petitions.js'

/** The minimum, however short the allowed age is. */
const lookMsMin = 50
const pulseMs = 1_000
const tellBlocksMs = 30_000

export class Overview {
  readonly #intake: Intake
  readonly #petitions: Petitions
  readonly #options: PetitionsOptions
  #timer: NodeJS.Timeout | undefined
  #stopped = false
  #looking = false
  #lookAgain = false
  #recordedAt = 0
  /** The number of the last logged overflow; null before the first read. */
  #overflowsAfter: number | null = null

  constructor(intake: Intake, petitions: Petitions, options: PetitionsOptions) {
    this.#intake = intake
    this.#petitions = petitions
    this.#options = options
  }

  start(): void {
    const { metrics, settings } = this.#options
    metrics.queueThreshold.set(settings.queueThreshold)
    for (const state of petitionStates) metrics.queueDepth.set({ state }, 0)
    this.#timer = setTimeout(() => void this.#look(), 0)
  }

  stop(): void {
    this.#stopped = true
    clearTimeout(this.#timer)
  }

  /** An overflow began or ended. */
  notice(): void {
    this.#lookAgain = this.#looking
    if (this.#looking || this.#stopped) return
    clearTimeout(this.#timer)
    void this.#look()
  }

  async #look(): Promise<void> {
    const { settings, log } = this.#options
    this.#looking = true
    // A little less than the allowed age, which leaves time for the read.
    const everyMs = Math.max(lookMsMin, settings.queueCacheTtlMs * 0.8)
    try {
      if (this.#intake.isReady) await this.#lookNow(everyMs)
    } catch (fault) {
      // The intake logs that the store is unavailable; this says what it means here.
      log.debug({ err: fault }, 'the counts of petitions could not be read; the last ones stay')
    }
    this.#looking = false
    if (this.#stopped) return
    const pauseMs = this.#lookAgain ? 0 : this.#intake.isReady ? everyMs : Math.min(everyMs, pulseMs)
    this.#lookAgain = false
    this.#timer = setTimeout(() => void this.#look(), pauseMs)
    this.#timer.unref()
  }

  async #lookNow(everyMs: number): Promise<void> {
    if (everyMs < pulseMs) await this.#intake.refresh()
    const { counts, after, overflows } = await this.#petitions.overview(this.#overflowsAfter)
    this.#overflowsAfter = after
    for (const [state, n] of Object.entries(counts)) {
      this.#options.metrics.queueDepth.set({ state: state as PetitionState }, n)
    }
    for (const event of overflows) this.#tell(event)
    if (performance.now() - this.#recordedAt < tellBlocksMs) return
    this.#recordedAt = performance.now()
    await this.#petitions.tellBlocks()
  }

  #tell({ seq, type, payload }: OverflowEvent): void {
    const { depth, threshold } = JSON.parse(payload) as { depth: number; threshold: number }
    const what = type.endsWith('.started') ? 'started' : 'ended'
    this.#options.log.warn({ seq, depth, threshold }, `petition queue overflow ${what}`)
  }
}
