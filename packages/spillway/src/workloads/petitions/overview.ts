/**
 * What an instance looks at in the background, so that no request has to: the counts behind the gauges, and the state of
 * the gate where the pulse of the intake, once a second, would be too slow for PETITION_QUEUE_CACHE_TTL.
 */
import { petitionStates } from '@spillway/protocol/wire'
import type { IntakeApi } from '../../index.js'
import type { PetitionsOptions } from './options.js'
import type { Petitions } from './petitions.js'

/** However short the allowed age is. */
const lookMsMin = 50
const pulseMs = 1_000
const tellBlocksMs = 30_000

export class Overview {
  readonly #intake: IntakeApi
  readonly #petitions: Petitions
  readonly #options: PetitionsOptions
  #timer: NodeJS.Timeout | undefined
  #stopped = false
  #toldAt = 0

  constructor(intake: IntakeApi, petitions: Petitions, options: PetitionsOptions) {
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

  async #look(): Promise<void> {
    const { settings, log } = this.#options
    // A little less than the allowed age, so that with the time that looking takes it is kept.
    const everyMs = Math.max(lookMsMin, settings.queueCacheTtlMs * 0.8)
    try {
      if (this.#intake.core.isReady) await this.#lookNow(everyMs)
    } catch (fault) {
      // The intake tells that the store is away; this says what it means here.
      log.debug({ err: fault }, 'the counts of petitions could not be read; the last ones stay')
    }
    if (this.#stopped) return
    const pauseMs = this.#intake.core.isReady ? everyMs : Math.min(everyMs, pulseMs)
    this.#timer = setTimeout(() => void this.#look(), pauseMs)
    this.#timer.unref()
  }

  async #lookNow(everyMs: number): Promise<void> {
    if (everyMs < pulseMs) await this.#intake.refresh()
    for (const { state, n } of await this.#petitions.counts()) {
      this.#options.metrics.queueDepth.set({ state }, Number(n))
    }
    if (performance.now() - this.#toldAt < tellBlocksMs) return
    this.#toldAt = performance.now()
    await this.#petitions.tellBlocks()
  }
}
