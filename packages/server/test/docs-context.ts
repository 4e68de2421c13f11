/** The names that fragments of the library's pages use without saying where they come from: those of the guide's first program. */
import { once } from 'node:events'
import { createServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import pg from 'pg'
import { createIntake, type Intake, type IntakeOptions, postgres } from 'spillway'
import Type from 'typebox'

const silent = { debug: () => undefined, info: () => undefined, warn: () => undefined, error: () => undefined }

/** The machine may be slow: an answer must not depend on that. */
const neverBusy = { busyQueueAbove: 1, acceptWaitBudgetMs: 60_000, storeTimeoutMs: 20_000, directWaitMs: 60_000 }

export type DocsContext = Awaited<ReturnType<typeof docsContext>>

/** What a fragment is given. `until` calls a function until it returns something. */
export type FragmentNames = DocsContext & { until: <T>(look: () => Promise<T | undefined>) => Promise<T> }

export async function docsContext(url: string) {
  const pool = new pg.Pool({ connectionString: url, max: 16 })
  // Its connections end when the database is dropped.
  pool.on('error', () => undefined)
  const intake = await createIntake({
    store: postgres({ url, poolMax: 8, log: silent }),
    log: silent,
    retryBaseMs: 10,
    ...neverBusy,
  })
  const placeOrder = intake.define('orders.place', {
    body: Type.Object({ customer: Type.String(), item: Type.String() }),
    run: async (order) => ({ shipped: order.item }),
  })
  const [place, tickets] = [intake.node(placeOrder), intake.nodeTickets()]
  const server = createServer((request, response) => tickets(request, response, () => place(request, response)))
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const origin = `http://127.0.0.1:${(server.address() as AddressInfo).port}`
  const close = async (): Promise<void> => {
    await intake.close()
    server.closeAllConnections()
    server.close()
    await pool.end()
  }
  return { url, pool, intake, placeOrder, order: { customer: 'ann', item: 'tea' }, origin, close }
}

const opened: Intake[] = []

/** As `createIntake`, for fragments that open one of their own. */
export async function openIntake(options: IntakeOptions): Promise<Intake> {
  const intake = await createIntake({ log: silent, ...neverBusy, ...options })
  opened.push(intake)
  return intake
}

export async function closeOpened(): Promise<void> {
  for (const intake of opened.splice(0)) await intake.close()
}
