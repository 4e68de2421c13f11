/**
 * Prepares a policy's providers once, when the policy is loaded, so that a decision only compares.
 *
 * Weighted choice is rendezvous hashing: every provider draws a number from the key and its id, and the highest wins.
 * With -weight ÷ ln(u) the chance to win is the weight's share. A provider that joins or leaves moves only the keys
 * that it wins or had won. A hash ring would need a table for each set of candidates, and constraints change that set
 * per request.
 */
import { hash } from 'node:crypto'
import type { Policy, PolicyProvider } from '@spillway/protocol/wire'

/** A 64-bit hash of a text, as two unsigned numbers. */
export interface Mark {
  high: number
  low: number
}

export interface PreparedProvider {
  id: string
  weight: number
  priority: number
  latencyMs: number
  cost: number
  isEnabled: boolean
  takes(taskType: string): boolean
  /** 0 to 1: what `best_score` compares. The same for every request. */
  score: number
  mark: Mark
}

/** SHA-256, so that all processes and versions draw the same. 1 to 2 µs. */
export function markOf(text: string): Mark {
  const digest = hash('sha256', text, 'buffer')
  return { high: digest.readUInt32BE(0), low: digest.readUInt32BE(4) }
}

/** Spreads each bit of a 32-bit number over all bits (the finalizer of MurmurHash3). */
function mixed(bits: number): number {
  let x = bits
  x = Math.imul(x ^ (x >>> 16), 0x85ebca6b)
  x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35)
  return (x ^ (x >>> 16)) >>> 0
}

/** 53 bits fill a double's fraction. */
const lowBits = 21
const range = 2 ** 53

/** Uniform between 0 and 1, excluding both: their logarithms are useless. */
export function drawn(key: Mark, provider: Mark): number {
  const high = mixed(key.high ^ provider.high)
  const low = mixed((key.low ^ provider.low) + high) >>> (32 - lowBits)
  return (high * 2 ** lowBits + low + 0.5) / range
}

/** The provider that wins this key; null if there are no candidates. */
export function winner(key: Mark, candidates: readonly PreparedProvider[]): PreparedProvider | null {
  let best: PreparedProvider | null = null
  let most = Number.NEGATIVE_INFINITY
  for (const candidate of candidates) {
    const won = -candidate.weight / Math.log(drawn(key, candidate.mark))
    if (won > most || (won === most && best !== null && candidate.id < best.id)) {
      best = candidate
      most = won
    }
  }
  return best
}

/** The highest score; among equals the lowest priority number, then the id. */
export function bestScored(candidates: readonly PreparedProvider[]): PreparedProvider | null {
  let best: PreparedProvider | null = null
  for (const candidate of candidates) if (best === null || isBefore(candidate, best)) best = candidate
  return best
}

function isBefore(a: PreparedProvider, b: PreparedProvider): boolean {
  if (a.score !== b.score) return a.score > b.score
  if (a.priority !== b.priority) return a.priority < b.priority
  return a.id < b.id
}

export function preparedProviders(policy: Policy): PreparedProvider[] {
  const { providers, score } = policy
  // The maximum of the whole policy, not of the candidates: otherwise one that leaves could reorder the others.
  const latencyMax = Math.max(...providers.map((p) => p.expected_latency_ms))
  const costMax = Math.max(...providers.map((p) => p.expected_cost))
  return providers.map((provider) => ({
    id: provider.provider_id,
    weight: provider.weight,
    priority: provider.priority,
    latencyMs: provider.expected_latency_ms,
    cost: provider.expected_cost,
    isEnabled: provider.enabled,
    takes: matcher(provider),
    score: scoreOf(
      { share: shareOf(provider.expected_latency_ms, latencyMax), weight: score.latency_weight },
      { share: shareOf(provider.expected_cost, costMax), weight: score.cost_weight },
    ),
    mark: markOf(provider.provider_id),
  }))
}

const shareOf = (value: number, most: number): number => (most === 0 ? 0 : value / most)

interface Part {
  share: number
  weight: number
}

function scoreOf(latency: Part, cost: Part): number {
  // Weights may be so large that their sum is not finite.
  const most = Math.max(latency.weight, cost.weight)
  if (most === 0) return 1
  const [l, c] = [latency.weight / most, cost.weight / most]
  return 1 - (l * latency.share + c * cost.share) / (l + c)
}

function matcher({ task_types: types }: PolicyProvider): (taskType: string) => boolean {
  if (types === undefined) return () => true
  const names = new Set(types.filter((type) => !type.endsWith('*')))
  const beginnings = types.filter((type) => type.endsWith('*')).map((type) => type.slice(0, -1))
  return (taskType) => names.has(taskType) || beginnings.some((beginning) => taskType.startsWith(beginning))
}
