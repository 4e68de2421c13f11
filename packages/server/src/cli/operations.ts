import type { OperationView } from '@spillway/protocol/wire'
import { type Api, ApiError, type Page } from './api.js'
import { exitCodes } from './exit.js'
import { renderTable } from './table.js'
import type { Terminal } from './terminal.js'

/** A running server, and where its answers are printed. */
export interface Remote {
  readonly api: Api
  readonly terminal: Terminal
  readonly json: boolean
}

/** Of operations, or of dead letters. */
export function printPage(
  { terminal, json }: Remote,
  page: Page<OperationView>,
  columns: readonly (keyof ReturnType<typeof rowOf>)[],
): number {
  if (json) {
    terminal.out(`${JSON.stringify(page)}\n`)
    return exitCodes.done
  }
  terminal.out(renderTable(page.items.map(rowOf), columns))
  if (page.next_cursor !== null) terminal.err(`more: --cursor ${page.next_cursor}\n`)
  return exitCodes.done
}

function rowOf(operation: OperationView) {
  return {
    id: operation.id,
    type: operation.operation_type,
    queue: operation.queue,
    partition: operation.partition,
    status: operation.status,
    attempt: `${operation.attempt}/${operation.max_attempts}`,
    created: operation.created_at,
    error: operation.error_message ?? '',
  }
}

/** One item in full, one member per line. */
export function printItem({ terminal, json }: Remote, item: object): number {
  const rows = Object.entries(item)
    .filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => ({ field: name, value: typeof value === 'string' ? value : JSON.stringify(value) }))
  terminal.out(json ? `${JSON.stringify(item)}\n` : renderTable(rows, ['field', 'value'], Number.POSITIVE_INFINITY))
  return exitCodes.done
}

/** Each id separately: one that cannot be changed does not stop the others. */
export async function changeOperations(
  { api, terminal, json }: Remote,
  action: 'retry' | 'cancel',
  ids: readonly string[],
): Promise<number> {
  let failures = 0
  for (const id of ids) {
    try {
      const answer = await api.changeOperation(id, action)
      terminal.out(
        json ? `${JSON.stringify(answer)}\n` : `${id} ${action === 'retry' ? 'queued again' : 'cancelled'}\n`,
      )
    } catch (error) {
      // An error about this id is reported and counted. If the server is gone or refuses us, the command ends.
      if (!(error instanceof ApiError) || !aboutOneOperation.has(error.code)) throw error
      failures++
      terminal.err(`${id} ${error.message}\n`)
    }
  }
  return failures === 0 ? exitCodes.done : exitCodes.failed
}

const aboutOneOperation: ReadonlySet<string> = new Set([
  'not_found',
  'conflict',
  'operation_running',
  'operation_not_failed',
  'operation_finished',
])
