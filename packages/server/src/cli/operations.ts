import type { OperationView } from '@spillway/protocol/wire'
import { type Api, ApiError, type Filter } from './api.js'
import { exitCodes } from './exit.js'
import { renderTable } from './table.js'
import type { Terminal } from './terminal.js'

interface Context {
  readonly api: Api
  readonly terminal: Terminal
  readonly json: boolean
}

const titles = ['id', 'type', 'queue', 'partition', 'status', 'attempt', 'created', 'error']

export async function listOperations({ api, terminal, json }: Context, filter: Filter): Promise<number> {
  const page = await api.listOperations(filter)
  if (json) {
    terminal.out(`${JSON.stringify(page)}\n`)
    return exitCodes.done
  }
  terminal.out(renderTable(page.items.map(rowOf), titles))
  if (page.next_cursor !== null) terminal.err(`more: --cursor ${page.next_cursor}\n`)
  return exitCodes.done
}

export function rowOf(operation: OperationView): Record<string, string> {
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

export async function showOperation(
  { api, terminal, json }: Context,
  id: string,
  waitSeconds: string | undefined,
): Promise<number> {
  printMembers(terminal, await api.showOperation(id, waitSeconds), json)
  return exitCodes.done
}

/** One item in full, one member per line. */
export function printMembers(terminal: Terminal, item: object, json: boolean): void {
  if (json) {
    terminal.out(`${JSON.stringify(item)}\n`)
    return
  }
  const rows = Object.entries(item)
    .filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => ({ field: name, value: typeof value === 'string' ? value : JSON.stringify(value) }))
  terminal.out(renderTable(rows, ['field', 'value'], Number.POSITIVE_INFINITY))
}

/** Each id separately: one that cannot be changed does not stop the others. */
export async function changeOperations(
  { api, terminal, json }: Context,
  action: 'retry' | 'cancel',
  ids: readonly string[],
): Promise<number> {
  let failures = 0
  for (const id of ids) {
    try {
      const answer = action === 'retry' ? await api.retryOperation(id) : await api.cancelOperation(id)
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
