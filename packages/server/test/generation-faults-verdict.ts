/** What must never happen, whatever fails: judged by what clients received and what the upstream sent. */

import { type SeenRequest, scriptedTokens } from '../../spillway/test/setup/scripted-upstream.js'
import type { Transcript } from './generation-faults-reader.js'

export interface Judged {
  findings: string[]
  done: number
  failed: number
  resumes: number
  cuts: number
  tokens: number
  /** By code. */
  errors: Record<string, number>
}

export function judge(all: readonly Transcript[], requests: readonly SeenRequest[]): Judged {
  const runs = new Map<string, SeenRequest[]>()
  for (const seen of requests) runs.set(seen.marker, [...(runs.get(seen.marker) ?? []), seen])
  const judged: Judged = { findings: [], done: 0, failed: 0, resumes: 0, cuts: 0, tokens: 0, errors: {} }
  for (const transcript of all) {
    for (const fault of faultsOf(transcript, runs.get(transcript.ask.marker) ?? [])) {
      judged.findings.push(`${transcript.ask.format} ${transcript.ask.marker} (${transcript.streamId}): ${fault}`)
    }
    const end = transcript.ends.at(-1)
    if (end?.kind === 'done') judged.done++
    else {
      judged.failed++
      const code = end?.code ?? 'none'
      judged.errors[code] = (judged.errors[code] ?? 0) + 1
    }
    judged.resumes += transcript.resumes
    judged.cuts += transcript.cuts
    judged.tokens += scriptedTokens(transcript.text).length
  }
  return judged
}

function faultsOf(transcript: Transcript, runs: readonly SeenRequest[]): string[] {
  const { ask, numbers, ends } = transcript
  const tokens = scriptedTokens(transcript.text)
  const faults: string[] = []
  const gap = numbers.findIndex((number, at) => number !== at + 1)
  if (gap !== -1) faults.push(`event ${numbers[gap]} is the ${gap + 1}th that came`)
  const foreign = tokens.find(({ marker }) => marker !== ask.marker)
  if (foreign !== undefined) faults.push(`a token of ${foreign.marker}`)
  const wrong = tokens.findIndex(({ number }, at) => number !== at + 1)
  if (wrong !== -1) faults.push(`token ${tokens[wrong]?.number} is the ${wrong + 1}th that came`)
  if (!isOneRun(tokens, runs)) faults.push(`tokens of more than one of ${runs.length} runs`)
  const last = ends.at(-1)
  if (last === undefined) {
    faults.push(`no end event (${tokens.length} tokens, ${transcript.cuts} cuts, status ${transcript.refused})`)
  } else if (last.kind === 'done' && tokens.length !== ask.tokens) {
    faults.push(`it is said to be whole with ${tokens.length} of ${ask.tokens} tokens`)
  }
  const numbered = ends.filter(({ number }) => number !== null)
  if (numbered.length > 1) faults.push(`${numbered.length} ends`)
  const [end] = numbered
  if (end !== undefined && end.number !== numbers.at(-1)) faults.push(`something came behind its end`)
  return faults
}

/** Each token says when it was sent: all of them while one and the same request was open. */
function isOneRun(tokens: readonly { sentMs: number | null }[], runs: readonly SeenRequest[]): boolean {
  const times = tokens.map(({ sentMs }) => sentMs ?? Number.NaN)
  const [from = 0, to = from] = [times[0], times.at(-1)]
  if (times.length === 0) return true
  return runs.some(({ beganMs, endedMs }) => from >= beganMs && (endedMs === null || to <= endedMs))
}
