/**
 * Maintenance: pushes are accepted and held in the operation queue, on every instance, and reach their partitions in order
 * when it ends. It is a pause of the operation type in the store, so it is exact and outlives every process.
 */
import type { SetMaintenance } from '@spillway/protocol/schema'
import type { Definition, Intake } from 'spillway/workload'
import type { Static } from 'typebox'
import { pushType } from '../push/push.js'
import type { Admin, AdminRequest } from './route.js'

export interface Maintenance {
  on(): Promise<void>
  off(): Promise<void>
  state(): Promise<{ maintenanceMode: boolean; bufferedMessages: number }>
}

export function maintenanceOf(intake: Intake, schema: string, definition: Definition): Maintenance {
  return {
    on: () => intake.pauseType(definition),
    off: () => intake.resumeType(definition),
    state: async () => {
      // The operation queue's limit bounds the waiting pushes.
      const { rows } = await intake.read<{ held: boolean; n: number }>(
        `SELECT EXISTS (SELECT FROM ${schema}.pauses p WHERE p.queue = '' AND p.partition = $1) AS held,
           coalesce((SELECT sum(json_array_length(o.payload->'messages')) FROM ${schema}.ops o WHERE o.type = $1), 0) AS n`,
        [pushType],
      )
      return { maintenanceMode: rows[0]?.held === true, bufferedMessages: Number(rows[0]?.n ?? 0) }
    },
  }
}

export const getMaintenance = ({ maintenance }: Admin): Promise<unknown> => maintenance.state()

export async function setMaintenance(
  { maintenance }: Admin,
  { body: { enabled } }: AdminRequest<unknown, Static<typeof SetMaintenance>>,
): Promise<unknown> {
  await (enabled ? maintenance.on() : maintenance.off())
  const message = enabled ? 'Pushes are accepted and held.' : 'Held pushes are stored, in order.'
  return { ...(await maintenance.state()), message }
}
