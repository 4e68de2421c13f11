import { describeConfig, type Environment, loadConfig } from '../config/index.js'
import { exitCodes } from './exit.js'
import { renderTable } from './table.js'
import type { Terminal } from './terminal.js'

export function showConfig(terminal: Terminal, options: { json: boolean; environment?: Environment }): number {
  const loaded = loadConfig(options.environment)
  const rows = describeConfig(loaded)
  for (const warning of loaded.warnings) terminal.err(`warning: ${warning}\n`)
  if (options.json) {
    terminal.out(`${JSON.stringify(rows)}\n`)
    return exitCodes.done
  }
  const cells = rows.map(({ name, value, unit, source, meaning }) => ({
    name,
    value: value === '' ? '-' : unit === '' ? value : `${value} ${unit}`,
    source,
    meaning,
  }))
  terminal.out(renderTable(cells, ['name', 'value', 'source', 'meaning'], Number.POSITIVE_INFINITY))
  return exitCodes.done
}
