/** The registry of blocks: the kinds of work, their versions, and what they accept. */
import { CreateBlock } from '@spillway/protocol/schema'
import { type Block, type BlockView, routingLimits } from '@spillway/protocol/wire'
import type { PageBounds, RequestFault } from 'spillway/workload'
import { type CutRows, compileValidator, cutRows, type Intake, pageSql } from 'spillway/workload'

export interface RegistryOptions {
  intake: Intake
  /** Of the store's tables, quoted for SQL. */
  schema: string
  /** Default: the protocol's limit. */
  blocksMax?: number
}

export interface BlockName {
  type: string
  version: string
}

export type BlockOutcome = { kind: 'created' | 'replaced'; block: BlockView } | { kind: 'exists' | 'full' }

interface Row extends Record<string, unknown> {
  body: unknown
  created_at: Date
  updated_at: Date
}

export class Registry {
  readonly #options: Required<RegistryOptions>

  constructor(options: RegistryOptions) {
    this.#options = { blocksMax: routingLimits.blocksMax, ...options }
  }

  /** `exists` if this type and version already exist. */
  create(block: Block): Promise<BlockOutcome> {
    return this.#write(block, false)
  }

  /** Creates or replaces it. */
  put(block: Block): Promise<BlockOutcome> {
    return this.#write(block, true)
  }

  async get({ type, version }: BlockName): Promise<BlockView | null> {
    const { intake, schema } = this.#options
    const { rows } = await intake.read<Row>(
      `SELECT body, created_at, updated_at FROM ${schema}.rt_blocks WHERE type = $1 AND version = $2`,
      [type, version],
    )
    return rows[0] === undefined ? null : toView(rows[0])
  }

  /** Sorted by type and version, both as texts. Stops after `bytesMax` bytes, but returns at least one. */
  async list(
    { limit, bytesMax }: PageBounds,
    { type, after }: { type?: string | undefined; after?: BlockName | undefined } = {},
  ): Promise<CutRows<BlockView>> {
    const { intake, schema } = this.#options
    const { rows } = await intake.read<Row & { cut: boolean }>(
      pageSql(
        `SELECT type, version, body, created_at, updated_at, octet_length(body::text) AS bytes FROM ${schema}.rt_blocks
         WHERE ($1::text IS NULL OR type = $1) AND ($2::text IS NULL OR (type, version) > ($2, $3)) ORDER BY type, version LIMIT $4`,
        'r.type, r.version',
        '$5',
      ),
      [type ?? null, after?.type ?? null, after?.version ?? null, limit, bytesMax],
    )
    return cutRows(rows, toView)
  }

  /** False if there was none. */
  async remove({ type, version }: BlockName): Promise<boolean> {
    const { intake, schema } = this.#options
    const sql = `SELECT ${schema}.rt_block_remove($1, $2) AS removed`
    const { rows } = await intake.read<{ removed: boolean }>(sql, [type, version])
    return rows[0]?.removed === true
  }

  async #write(block: Block, replace: boolean): Promise<BlockOutcome> {
    const { intake, schema, blocksMax } = this.#options
    const { rows } = await intake.read<{ outcome: BlockOutcome['kind']; created_at: Date; updated_at: Date }>(
      `SELECT outcome, created_at, updated_at FROM ${schema}.rt_block_put($1, $2, $3, $4, $5)`,
      [block.type, block.version, JSON.stringify(block), replace, blocksMax],
    )
    const [row] = rows
    if (row === undefined) throw new Error('a block was put without an answer')
    const { outcome: kind } = row
    return kind === 'exists' || kind === 'full' ? { kind } : { kind, block: toView({ ...row, body: block }) }
  }
}

function toView({ body, created_at, updated_at }: Row): BlockView {
  return { ...(body as Block), created_at: created_at.toISOString(), updated_at: updated_at.toISOString() }
}

export type CheckedBlock = { ok: true; block: Block } | { ok: false; errors: RequestFault[] }

const checkShape = compileValidator(CreateBlock)

/** A block from a request, with its defaults. `named`: the path's name, which the body may repeat but not contradict. */
export function checkBlock(value: unknown, named?: BlockName): CheckedBlock {
  const isObject = typeof value === 'object' && value !== null && !Array.isArray(value)
  const shape = checkShape(isObject && named !== undefined ? { ...named, ...value } : value)
  if (!shape.ok) return shape
  const block = { status: 'active', ...shape.value } as Block
  const errors = faultsOf(block, named)
  return errors.length === 0 ? { ok: true, block } : { ok: false, errors }
}

function faultsOf(block: Block, named: BlockName | undefined): RequestFault[] {
  const faults: RequestFault[] = []
  for (const name of ['type', 'version'] as const) {
    if (named !== undefined && named[name] !== block[name]) {
      faults.push({ path: `/${name}`, message: 'is not that of the path' })
    }
  }
  for (const name of ['input_schema', 'metadata'] as const) {
    const part = block[name]
    if (part === undefined || Buffer.byteLength(JSON.stringify(part)) <= routingLimits.blockPartBytes) continue
    faults.push({ path: `/${name}`, message: `must not have more than ${routingLimits.blockPartBytes} bytes` })
  }
  const { capabilities = [] } = block
  for (const [i, capability] of capabilities.entries()) {
    if (capabilities.indexOf(capability) < i) faults.push({ path: `/capabilities/${i}`, message: 'is named before' })
  }
  return faults
}
