/** A long ledger, and what it costs to verify it. */
import { setTimeout as delay } from 'node:timers/promises'
import pg from 'pg'
import { usageOf } from '../process-usage.js'
import type { Site } from './petitions-sites.js'

const rowsAtOnce = 10_000
const lookMs = 20

/** By the function that every commit uses, with events such as submissions make. */
export async function fillLedger(site: Site, rows: number): Promise<void> {
  const client = new pg.Client({ connectionString: site.databaseUrl })
  await client.connect()
  try {
    for (let made = 0; made < rows; made += rowsAtOnce) {
      await client.query(
        `SELECT spillway.ledger_append(
           array_agg('petition.submission.received'::text), array_agg('submitter:' || x.who), array_agg(md5(x.who)),
           array_agg('{"content_hash":"' || encode(sha256(convert_to(x.who, 'UTF8')), 'hex') || '","petition_id":"' || gen_random_uuid()
             || '","realm":"harbour","submitter_id":"' || x.who || '","type":"GENERAL"}'))
         FROM (SELECT gen_random_uuid()::text AS who FROM generate_series(1, $1::int)) x`,
        [Math.min(rowsAtOnce, rows - made)],
      )
    }
    await client.query('VACUUM ANALYZE spillway.ledger')
  } finally {
    await client.end()
  }
}

export interface Verified {
  readonly rowsPerSecond: number
  /** The largest that was seen. */
  readonly rssMb: number
  /** Over what it was before. */
  readonly rssGrowthMb: number
}

export async function verifyLedger(site: Site, rows: number): Promise<Verified> {
  const before = usageOf(site.pid).rssMb
  let largest = before
  const over = new AbortController()
  const watching = watch(site.pid, over.signal, (rssMb) => {
    largest = Math.max(largest, rssMb)
  })
  try {
    const began = performance.now()
    const answer = await fetch(`${site.origin}/api/v1/ledger/verify`)
    const verified = (await answer.json()) as { ok?: boolean; to?: number }
    const seconds = (performance.now() - began) / 1_000
    if (verified.ok !== true || verified.to !== rows)
      throw new Error(`the ledger was not verified: ${JSON.stringify(verified)}`)
    return { rowsPerSecond: rows / seconds, rssMb: largest, rssGrowthMb: largest - before }
  } finally {
    over.abort()
    await watching
  }
}

async function watch(pid: number, over: AbortSignal, see: (rssMb: number) => void): Promise<void> {
  while (!over.aborted) {
    see(usageOf(pid).rssMb)
    await delay(lookMs)
  }
}
