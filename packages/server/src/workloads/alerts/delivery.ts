/**
 * Delivers alerts through the operation queue, in one lane per alert. The queue does retries and ordering, and takes over
 * the work of a killed process.
 *
 *   waiting ──2xx──► delivered
 *      │──attempts used up, or an answer that no retry changes──► failed, a dead letter ──redriven──► waiting
 *      └──too many wait──► dropped (alert-log.ts)
 */
import { alertSeverities, alertStatuses } from '@spillway/protocol/wire'
import { type Definition, FailOperation, type Intake, RetryOperation } from 'spillway/workload'
import Type, { type Static } from 'typebox'
import type { AlertsOptions, AlertTiming } from './index.js'
import { createSender, type Webhook } from './webhook.js'

/** The webhook's body. */
export const AlertNotice = Type.Object({
  alert_name: Type.String(),
  severity: Type.Enum([...alertSeverities]),
  status: Type.Enum([...alertStatuses]),
  message: Type.String(),
  labels: Type.Record(Type.String(), Type.String(), { description: 'With the name, which alert it is' }),
  annotations: Type.Record(Type.String(), Type.Union([Type.Number(), Type.String()]), {
    description: 'Figures at that time',
  }),
  timestamp: Type.String({ format: 'date-time', description: 'When it changed' }),
})

const DeliveryBody = Type.Object({ id: Type.String(), key: Type.String(), notice: AlertNotice })
export type DeliveryOrder = Static<typeof DeliveryBody>

const queue = 'spillway:alerts'
const retriesMax = 9
/** Added to an attempt's time, for the store. */
const storeMs = 15_000

export function defineDelivery(
  intake: Intake,
  webhook: Webhook,
  { schema, log, metrics }: AlertsOptions,
  timing: AlertTiming,
): Definition<DeliveryOrder> {
  const send = createSender(webhook, timing.sendMs)

  /** False: it was dropped meanwhile. After this it cannot be dropped, because the receiver may see it. */
  const begin = (id: string): Promise<boolean> =>
    intake.transaction(async (tx) => {
      const { rows } = await tx.query<{ sends: boolean }>(
        `WITH begun AS (UPDATE ${schema}.alerts a SET attempts = a.attempts + 1, delivery = 'waiting' WHERE a.id = $1 AND a.delivery <> 'dropped' RETURNING 1)
         SELECT EXISTS (SELECT FROM begun) OR NOT EXISTS (SELECT FROM ${schema}.alerts a WHERE a.id = $1) AS sends`,
        [id],
      )
      return rows[0]?.sends === true
    })
  const giveUp = async (id: string): Promise<void> => {
    await intake.transaction((tx) =>
      tx.query(`UPDATE ${schema}.alerts a SET delivery = 'failed' WHERE a.id = $1`, [id]),
    )
    metrics.deliveries.labels('failed').inc()
  }

  return intake.define('alerts.deliver', {
    body: DeliveryBody,
    lane: ({ key }) => [queue, key],
    priority: 1,
    timeoutMs: timing.sendMs + storeMs,
    maxRetries: retriesMax,
    retry: { baseMs: timing.retryBaseMs, maxMs: timing.retryMaxMs },
    run: async ({ id, notice }, ctx) => {
      if (!(await begin(id))) return { delivery: 'dropped' }
      const sent = await send(JSON.stringify(notice), {
        idempotencyKey: ctx.id,
        traceparent: ctx.traceparent,
        signal: ctx.signal,
      })
      // Stopping, or the lease is lost: not the receiver's fault, and not an attempt.
      ctx.signal.throwIfAborted()
      const about = { alert: notice.alert_name, status: notice.status, operation: ctx.id, attempt: ctx.attempt }
      if (sent.kind === 'delivered') {
        await ctx.tx.query(`UPDATE ${schema}.alerts a SET delivery = 'delivered' WHERE a.id = $1`, [id])
        metrics.deliveries.labels('delivered').inc()
        return { delivery: 'delivered' }
      }
      if (sent.kind === 'retry' && ctx.attempt < ctx.maxAttempts) {
        metrics.deliveries.labels('retried').inc()
        throw new RetryOperation(sent.why, sent.afterMs === undefined ? {} : { afterMs: sent.afterMs })
      }
      await giveUp(id)
      log.error({ ...about, why: sent.why }, 'an alert could not be delivered; it is kept as a dead letter')
      throw new FailOperation(sent.why)
    },
  })
}
