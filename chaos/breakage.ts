/**
 * A queue that is broken on purpose, one promise at a time, to show that the checker notices. Real parts are broken, not
 * the checker's input: functions of the database's own, or the store that the app's intake writes through.
 */
import pg from 'pg'
import type { Store } from 'spillway'
import { laneOf } from 'spillway/workload'

export const breakages = ['fence', 'lane', 'ack', 'batch'] as const
export type Breakage = (typeof breakages)[number]

export const breakageMeanings: Readonly<Record<Breakage, string>> = {
  fence: 'a settlement counts though its lease is lost',
  lane: "a lane's operations are locked by several rows, not by one",
  ack: 'the acceptance is answered before it is committed',
  batch: 'messages are done with when their delivery is over, whatever was answered',
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
            // The caller has its answer already, and the work is gone: this is the breakage.
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
  if (breakage !== 'fence' && breakage !== 'batch') return
  const client = new pg.Client({ connectionString: url })
  await client.connect()
  try {
    await (breakage === 'fence' ? breakFence(client, schema) : breakBatch(client, schema))
  } finally {
    await client.end()
  }
}

/** What the fence says is not heard; neither is the count of what a settlement took, which would notice as well. */
async function breakFence(client: pg.Client, schema: string): Promise<void> {
  const { parameters, passed } = await putAside(client, schema, 'settle')
  await client.query(`CREATE FUNCTION "${schema}".settle(${parameters}) RETURNS bigint[] LANGUAGE plpgsql AS $broken$
    BEGIN
      BEGIN
        PERFORM "${schema}".settle_whole(${passed});
      EXCEPTION WHEN internal_error THEN NULL;
      END;
      RETURN '{}';
    END $broken$`)
}

/** The cursor of a group moves behind all that it was handed. */
async function breakBatch(client: pg.Client, schema: string): Promise<void> {
  const { parameters, passed } = await putAside(client, schema, 'mq_end')
  await client.query(`CREATE FUNCTION "${schema}".mq_end(${parameters}) RETURNS uuid LANGUAGE plpgsql AS $broken$
    BEGIN
      UPDATE "${schema}".mq_cursors SET done = batch WHERE partition = $1 AND grp = $2;
      RETURN "${schema}".mq_end_whole(${passed});
    END $broken$`)
}

/** The function goes on under another name; what stands in its place takes the same parameters and may pass them on. */
async function putAside(
  client: pg.Client,
  schema: string,
  name: string,
): Promise<{ parameters: string; passed: string }> {
  const { rows } = await client.query<{ named: string; count: number; parameters: string }>(
    `SELECT p.oid::regprocedure::text AS named, p.pronargs AS count, pg_get_function_arguments(p.oid) AS parameters
     FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1 AND p.proname = $2`,
    [schema, name],
  )
  const [found] = rows
  if (found === undefined || rows.length !== 1) {
    throw new Error(`The schema ${schema} has ${rows.length} functions named ${name}; one is to be broken.`)
  }
  await client.query(`ALTER FUNCTION ${found.named} RENAME TO ${name}_whole`)
  const passed = Array.from({ length: found.count }, (_, i) => `$${i + 1}`).join(', ')
  return { parameters: found.parameters, passed }
}
