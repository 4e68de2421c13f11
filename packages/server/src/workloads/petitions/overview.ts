/**
 * Background reads of an instance, so that no request has to make them: the counts for the gauges, the overflows witnessed
 * since it started (each is logged once), and the gate's state if the intake's pulse, once a second, is too slow for
 * PETITION_QUEUE_CACHE_TTL. The commit that witnesses an overflow triggers a read at once; if that hint is lost, the next
 * read finds it.
 */
import { petitionStates } from '@spillway/protocol/wire'
import type { PetitionsContext } from './context.js'
import { readOverview, reportBlocks } from './petitions.js'

/** The minimum, however short the allowed age is. */
const lookMsMin = 50
const pulseMs = 1_000
const reportBlocksMs = 30_000

export class Overview {
  readonly #context: PetitionsContext
  #timer: NodeJS.Timeout | undefined
  #stopped = false
  #looking = false
  #lookAgain = false
  #recordedAt = 0
  /** The number of the last logged overflow; null before the first read. */
  #overflowsAfter: number | null = null

  constructor(context: PetitionsContext) {
    this.#context = context
    const { metrics, settings } = context
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
    const { intake, settings, log } = this.#context
    this.#looking = true
    // A little less than the allowed age, which leaves time for the read.
    const everyMs = Math.max(lookMsMin, settings.queueCacheTtl * 800)
    try {
      if (intake.isReady) await this.#lookNow(everyMs)
    } catch (fault) {
      // The intake logs that the store is unavailable; this says what it means here.
      log.debug({ err: fault }, 'could not read the petition counts; the last known ones are shown')
    }
    this.#looking = false
    if (this.#stopped) return
    const pauseMs = this.#lookAgain ? 0 : intake.isReady ? everyMs : Math.min(everyMs, pulseMs)
    this.#lookAgain = false
    this.#timer = setTimeout(() => void this.#look(), pauseMs)
    this.#timer.unref()
  }

  async #lookNow(everyMs: number): Promise<void> {
    const { intake, metrics, log } = this.#context
    if (everyMs < pulseMs) await intake.refresh()
    const { counts, after, overflows } = await readOverview(this.#context, this.#overflowsAfter)
    this.#overflowsAfter = after
    for (const [state, n] of Object.entries(counts)) metrics.queueDepth.set({ state }, n)
    for (const { seq, type, payload } of overflows) {
      const { depth, threshold } = JSON.parse(payload) as { depth: number; threshold: number }
      log.warn({ seq, depth, threshold }, `petition queue overflow ${type.endsWith('.started') ? 'started' : 'ended'}`)
    }
    if (performance.now() - this.#recordedAt < reportBlocksMs) return
    this.#recordedAt = performance.now()
    await reportBlocks(this.#context)
  }
}
