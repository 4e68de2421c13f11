/**
 * Policies: stored in the database, and prepared in memory for decisions.
 *
 *   not loaded ──all are read──► loaded ──change notification, or a few seconds passed──► looking ──► loaded
 *                                                                                           └──store away──► loaded, unchanged
 *
 * Changes are numbered in commit order. A look reads the last number, then the changes since the last look: a change
 * that commits meanwhile has a higher number, and the next look finds it.
 */
import { PutPolicy } from '@spillway/protocol/schema'
import { type Policy, type PolicyView, routingLimits } from '@spillway/protocol/wire'
import type { PageBounds, RequestFault } from 'spillway/workload'
import { type CutRows, compileValidator, cutRows, type Intake, type IntakeLog, pageSql } from 'spillway/workload'
import { everyTenant, PolicyBook } from './decision.js'

export interface PoliciesOptions {
  intake: Intake
  /** Of the store's tables, quoted for SQL. */
  schema: string
  log: Pick<IntakeLog, 'info' | 'warn' | 'error'>
  /** Interval of unprompted looks, because notifications can be lost. Default 15,000. */
  pollMs?: number
  /** Default: the protocol's limit. */
  policiesMax?: number
}

export type PutOutcome = { kind: 'created' | 'replaced'; policy: PolicyView } | { kind: 'full' }

/** Without a tenant: the policy for every tenant. */
export interface PolicyName {
  tenantId?: string | undefined
  policyId: string
}

interface Row extends Record<string, unknown> {
  tenant: string
  id: string
  body: unknown
  version: number
  updated_at: Date
}

const pollMsDefault = 15_000
/** Poll interval until the first load: nothing can be decided before. */
const firstPollMs = 100
const rowsMax = 500

export class Policies {
  /** The policies for decisions. */
  readonly book = new PolicyBook()
  /** The same, once loaded. */
  readonly loaded: Promise<PolicyBook>
  /** False: not loaded yet, so the book does not have the stored policies. */
  isLoaded = false
  #setLoaded: (book: PolicyBook) => void = () => undefined
  readonly #options: Required<PoliciesOptions>
  #isBehind = false
  /** The last change, and the number of removals, in the book. */
  #change = 0
  #removals = 0
  /** The last look that began, and the one that waits for it. */
  #looking: Promise<void> = Promise.resolve()
  #nextLook: Promise<void> | null = null
  #timer: NodeJS.Timeout | undefined
  #closed = false

  constructor(options: PoliciesOptions) {
    this.#options = { pollMs: pollMsDefault, policiesMax: routingLimits.policiesMax, ...options }
    this.loaded = new Promise((resolve) => {
      this.#setLoaded = resolve
    })
    const refresh = (): void => void this.refresh()
    options.intake.onNotice('rtpol', refresh, refresh)
  }

  /** Loads now, if the store is available, and then keeps up to date. */
  async start(): Promise<void> {
    await this.refresh()
    this.#schedule()
  }

  async close(): Promise<void> {
    this.#closed = true
    clearTimeout(this.#timer)
    await (this.#nextLook ?? this.#looking)
  }

  /** Resolves when the book has everything committed before this call, or the store failed (which is logged). */
  refresh(): Promise<void> {
    // A look that has not begun will see it. A running look may have read before the commit.
    this.#nextLook ??= this.#looking.then(() => {
      this.#nextLook = null
      this.#looking = this.#look()
      return this.#looking
    })
    return this.#nextLook
  }

  async put(policy: Policy): Promise<PutOutcome> {
    const { intake, schema, policiesMax } = this.#options
    const { rows } = await intake.read<{ outcome: 'created' | 'replaced' | 'full'; version: number; updated_at: Date }>(
      `SELECT outcome, version, updated_at FROM ${schema}.rt_policy_put($1, $2, $3, $4)`,
      [policy.tenant_id ?? everyTenant, policy.policy_id, JSON.stringify(policy), policiesMax],
    )
    const [row] = rows
    if (row === undefined) throw new Error('a policy was put without an answer')
    if (row.outcome === 'full') return { kind: 'full' }
    await this.refresh()
    return { kind: row.outcome, policy: toView({ ...row, body: policy }) }
  }

  async get({ tenantId = everyTenant, policyId }: PolicyName): Promise<PolicyView | null> {
    const { intake, schema } = this.#options
    const { rows } = await intake.read<Row>(
      `SELECT tenant, id, body, version, updated_at FROM ${schema}.rt_policies WHERE tenant = $1 AND id = $2`,
      [tenantId, policyId],
    )
    return rows[0] === undefined ? null : toView(rows[0])
  }

  /**
   * Sorted by tenant (general ones first) and id. `tenantId` null: only the general ones; undefined: all. Stops after
   * `bytesMax` bytes, but returns at least one.
   */
  async list(
    { limit, bytesMax }: PageBounds,
    { tenantId, after }: { tenantId?: string | null | undefined; after?: PolicyName | undefined } = {},
  ): Promise<CutRows<PolicyView>> {
    const { intake, schema } = this.#options
    const tenant = tenantId === null ? everyTenant : (tenantId ?? null)
    const { rows } = await intake.read<Row & { cut: boolean }>(
      pageSql(
        `SELECT tenant, id, body, version, updated_at, octet_length(body::text) AS bytes FROM ${schema}.rt_policies
         WHERE ($1::text IS NULL OR tenant = $1) AND ($3::text IS NULL OR (tenant, id) > ($2, $3)) ORDER BY tenant, id LIMIT $4`,
        'r.tenant, r.id',
        '$5',
      ),
      [tenant, after?.tenantId ?? everyTenant, after?.policyId ?? null, limit, bytesMax],
    )
    return cutRows(rows, toView)
  }

  /** False if there was none. */
  async remove({ tenantId = everyTenant, policyId }: PolicyName): Promise<boolean> {
    const { intake, schema } = this.#options
    const sql = `SELECT ${schema}.rt_policy_remove($1, $2) AS removed`
    const { rows } = await intake.read<{ removed: boolean }>(sql, [tenantId, policyId])
    if (rows[0]?.removed !== true) return false
    await this.refresh()
    return true
  }

  #schedule(): void {
    if (this.#closed) return
    const ms = this.isLoaded ? this.#options.pollMs : firstPollMs
    this.#timer = setTimeout(() => void this.refresh().finally(() => this.#schedule()), ms)
    this.#timer.unref()
  }

  async #look(): Promise<void> {
    const { intake, log } = this.#options
    // Its tables may not exist yet.
    if (this.#closed || !intake.isReady) return
    try {
      await this.#catchUp()
      if (this.#isBehind) log.info({ policies: this.book.size }, 'policies are up to date again')
      this.#isBehind = false
      this.isLoaded = true
      this.#setLoaded(this.book)
    } catch (fault) {
      if (!this.#isBehind) log.warn({ err: fault }, 'cannot read changes of policies, retrying')
      this.#isBehind = true
    }
  }

  async #catchUp(): Promise<void> {
    const { intake, schema } = this.#options
    const { rows } = await intake.read<{ change: number; removals: number }>(
      `SELECT change, removals FROM ${schema}.rt_state`,
    )
    const [state] = rows
    if (state === undefined) throw new Error('the routing state has no row')
    const { change, removals } = state
    // Lower than before: another database, or a restored one.
    const isOther = change < this.#change
    if (!isOther && change === this.#change) return
    await this.#readChanged(isOther ? 0 : this.#change)
    if (isOther || removals !== this.#removals) await this.#forgetRemoved()
    this.#change = change
    this.#removals = removals
  }

  async #readChanged(since: number): Promise<void> {
    const { intake, schema, log } = this.#options
    for (let after = since; ; ) {
      const { rows } = await intake.read<Row & { change: number }>(
        `SELECT tenant, id, body, change FROM ${schema}.rt_policies WHERE change > $1 ORDER BY change LIMIT ${rowsMax}`,
        [after],
      )
      for (const { tenant, id, body, change } of rows) {
        after = change
        const checked = checkPolicy(body)
        if (checked.ok) {
          this.book.set(checked.policy)
        } else {
          // Written by a newer version. The others must not wait for it.
          const { errors } = checked
          log.error({ tenant, policy: id, errors }, 'a stored policy is not valid; the version in use is kept')
        }
      }
      if (rows.length < rowsMax) return
    }
  }

  async #forgetRemoved(): Promise<void> {
    const { intake, schema } = this.#options
    const { rows } = await intake.read<{ tenant: string; id: string }>(`SELECT tenant, id FROM ${schema}.rt_policies`)
    const there = new Set(rows.map(({ tenant, id }) => `${tenant}\0${id}`))
    for (const [tenant, id] of [...this.book.names()]) {
      if (!there.has(`${tenant}\0${id}`)) this.book.delete(tenant, id)
    }
  }
}

function toView({ body, version, updated_at }: Pick<Row, 'body' | 'version' | 'updated_at'>): PolicyView {
  return { ...(body as Policy), version, updated_at: updated_at.toISOString() }
}

export type CheckedPolicy = { ok: true; policy: Policy } | { ok: false; errors: RequestFault[] }

const checkShape = compileValidator(PutPolicy)

/** A policy from a request, with its defaults. */
export function checkPolicy(value: unknown): CheckedPolicy {
  const shape = checkShape(value)
  if (!shape.ok) return shape
  const { strategy = 'weighted', providers, score = {}, ...given } = shape.value
  const policy: Policy = {
    ...given,
    strategy,
    providers: providers.map((provider) => ({
      ...{ weight: 1, priority: routingLimits.providerPriorityDefault, enabled: true },
      ...provider,
    })),
    score: { latency_weight: 0.5, cost_weight: 0.5, ...score },
  }
  const errors = faultsOf(policy)
  return errors.length === 0 ? { ok: true, policy } : { ok: false, errors }
}

function faultsOf(policy: Policy): RequestFault[] {
  const { providers, fallback = [] } = policy
  const ids = providers.map(({ provider_id }) => provider_id)
  const faults: RequestFault[] = [
    ...repeated(ids).map((i) => ({
      path: `/providers/${i}/provider_id`,
      message: 'is the id of another provider too',
    })),
    ...repeated(fallback).map((i) => ({ path: `/fallback/${i}`, message: 'is named before' })),
  ]
  for (const [i, { task_types: types = [] }] of providers.entries()) {
    for (const [j, type] of types.entries()) {
      if (!type.slice(0, -1).includes('*')) continue
      faults.push({ path: `/providers/${i}/task_types/${j}`, message: 'may have a star at its end only' })
    }
  }
  for (const [i, id] of fallback.entries()) {
    if (!ids.includes(id)) faults.push({ path: `/fallback/${i}`, message: 'names no provider of this policy' })
  }
  if (fallback.length === 0 && providers.every(({ weight }) => weight === 0)) {
    faults.push({ path: '/providers', message: 'must have one with a weight above 0, or the policy a fallback' })
  }
  if (Buffer.byteLength(JSON.stringify(policy)) > routingLimits.policyBytes) {
    faults.push({ path: '', message: `must not have more than ${routingLimits.policyBytes} bytes` })
  }
  return faults
}

/** The positions of repeated values. */
function repeated(values: readonly string[]): number[] {
  const seen = new Set<string>()
  return values.flatMap((value, i) => {
    if (seen.has(value)) return [i]
    seen.add(value)
    return []
  })
}
