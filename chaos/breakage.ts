/**
 * A queue that is broken on purpose, one promise at a time, to show that the checker notices. Real parts are broken, not
 * the checker's input: the database's own `settle`, or the store that the app's intake writes through.
 */
import pg from 'pg'
import type { Store } from 'spillway'
import { laneOf } from 'spillway/internal'

export const breakages = ['fence', 'lane', 'ack'] as const
export type Breakage = (typeof breakages)[number]

export const breakageMeanings: Readonly<Record<Breakage, string>> = {
  fence: 'a settlement counts though its lease is lost',
  lane: "a lane's operations are locked by several rows, not by one",
  ack: 'the acceptance is told before it is committed',
}

/** How long after the answer the commit comes. A process that dies meanwhile takes what it answered with it. */
const commitLagMs = 150
const rowsPerLane = 3

/** The store as the app uses it, with what is broken there. */
export function breakStore(store: Store, breakage: Breakage | null): Store {
  switch (breakage) {
    case 'lane': {
      let turn = 0
      const spread: Store['accept'] extends (items: infer Items, ...rest: never[]) => unknown
        ? (items: Items) => Items
        : never = (items) =>
        items.map((item) => ({ ...item, lane: laneOf([item.queue, `${item.partition}/${turn++ % rowsPerLane}`]).id }))
      return {
        ...store,
        accept: (items, context) => store.accept(spread(items), context),
        acceptAndApply: (items, context, effect) => store.acceptAndApply(spread(items), context, effect),
        acceptWithEffect: (items, ...rest) => store.acceptWithEffect(spread(items), ...rest),
      }
    }
    case 'ack':
      return {
        ...store,
        accept: async (items, context) => {
          const tx = await store.begin(30_000)
          const accepted = await store.acceptWithin(tx, items, context)
          setTimeout(() => {
            // Whoever was answered cannot be told any more: that is what is broken here.
            tx.commit().catch((fault: unknown) => console.error('the late commit failed', fault))
          }, commitLagMs)
          return accepted
        },
      }
    default:
      return store
  }
}

/** Breaks what is in the database, for all processes. Before the first of them is connected. */
export async function breakSchema(url: string, schema: string, breakage: Breakage | null): Promise<void> {
  if (breakage !== 'fence') return
  const client = new pg.Client({ connectionString: url })
  await client.connect()
  try {
    const { rows } = await client.query<{ named: string; arguments: number; all: string }>(
      `SELECT p.oid::regprocedure::text AS named, p.pronargs AS arguments, pg_get_function_arguments(p.oid) AS all
       FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1 AND p.proname = 'settle'`,
      [schema],
    )
    const [settle] = rows
    if (settle === undefined || rows.length !== 1) {
      throw new Error(`The schema ${schema} has ${rows.length} functions named settle; the fence is looked for in one.`)
    }
    const passed = Array.from({ length: settle.arguments }, (_, i) => `$${i + 1}`).join(', ')
    await client.query(`ALTER FUNCTION ${settle.named} RENAME TO settle_fenced`)
    // What the fence says is not heard; neither is the count of what a settlement took, which would notice as well.
    await client.query(`CREATE FUNCTION "${schema}".settle(${settle.all}) RETURNS bigint[] LANGUAGE plpgsql AS $broken$
      BEGIN
        BEGIN
          PERFORM "${schema}".settle_fenced(${passed});
        EXCEPTION WHEN internal_error THEN NULL;
        END;
        RETURN '{}';
      END $broken$`)
  } finally {
    await client.end()
  }
}
