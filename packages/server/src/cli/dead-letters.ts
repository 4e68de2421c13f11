import type { Api, Filter } from './api.js'
import { exitCodes, UsageError } from './exit.js'
import type { Remote } from './operations.js'
import { startProgress } from './progress.js'

/** Dead letters handled by one call: short calls show progress and hold no lock for long. */
const stepMax = 200

export async function redriveDeadLetters(
  { api, terminal, json }: Remote,
  which: { readonly ids: readonly string[]; readonly filter: Filter; readonly all: boolean },
): Promise<number> {
  const filtered = isFiltered(which.filter)
  if (which.ids.length === 0 && !filtered && !which.all) {
    throw new UsageError('say which: ids, a filter such as --queue orders, or --all')
  }
  if (which.ids.length > 0 && (filtered || which.all)) throw new UsageError('give ids or a filter, not both')
  const progress = startProgress(terminal, 'redriven')
  const sum = { moved: 0, skipped: 0 }
  try {
    if (which.ids.length > 0) {
      for (let from = 0; from < which.ids.length; from += stepMax) {
        add(sum, await api.redrive({ ids: which.ids.slice(from, from + stepMax) }))
        progress.update(sum.moved + sum.skipped, which.ids.length)
      }
    } else {
      const total = await totalOf(api, which.filter)
      // One pass, by the cursor: a letter that dies again at once would otherwise be offered forever.
      for (let cursor: string | null | undefined; cursor !== null; ) {
        const step = await api.redrive({
          filter: which.filter,
          limit: stepMax,
          ...(cursor !== undefined && { cursor }),
        })
        add(sum, step)
        progress.update(sum.moved + sum.skipped, total)
        cursor = step.next_cursor ?? null
      }
    }
  } finally {
    progress.end()
  }
  terminal.out(json ? `${JSON.stringify(sum)}\n` : `moved ${sum.moved}, skipped ${sum.skipped}\n`)
  return exitCodes.done
}

export async function purgeDeadLetters(
  { api, terminal, json }: Remote,
  which: { readonly filter: Filter; readonly all: boolean; readonly yes: boolean },
): Promise<number> {
  if (!isFiltered(which.filter) && !which.all)
    throw new UsageError('say which: a filter such as --queue orders, or --all')
  const total = await totalOf(api, which.filter)
  if (!which.yes) {
    const count = total === null ? 'the matching' : String(total)
    throw new UsageError(`this deletes ${count} dead letters for good; add --yes to do it`)
  }
  const progress = startProgress(terminal, 'purged')
  let purged = 0
  try {
    for (let limit = stepOf(total, 0); limit > 0; limit = stepOf(total, purged)) {
      const step = await api.purge(which.filter, limit)
      purged += step.purged
      progress.update(purged, total)
      if (step.purged < limit) break
    }
  } finally {
    progress.end()
  }
  terminal.out(json ? `${JSON.stringify({ purged })}\n` : `purged ${purged}\n`)
  return exitCodes.done
}

/** At most as many as at the start: letters that die during a purge were not confirmed by the user. */
function stepOf(total: number | null, done: number): number {
  return total === null ? stepMax : Math.min(stepMax, total - done)
}

function isFiltered(filter: Filter): boolean {
  return Object.values(filter).some((value) => value !== undefined)
}

async function totalOf(api: Api, filter: Filter): Promise<number | null> {
  return (await api.listDeadLetters({ ...filter, limit: '1' })).total ?? null
}

function add(sum: { moved: number; skipped: number }, step: { moved: number; skipped: number }): void {
  sum.moved += step.moved
  sum.skipped += step.skipped
}
