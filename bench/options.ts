import { parseArgs } from 'node:util'

export interface BenchOptions {
  /** Names of sections; empty means all. */
  readonly only: readonly string[]
  readonly quick: boolean
  readonly databaseUrl: string | null
  /** Where JSON and plots of this run go. */
  readonly out: string | null
  /** Refresh docs/benchmarks.md even from a partial or quick run. */
  readonly write: boolean
  /** A missed target is a failure. */
  readonly strict: boolean
  readonly list: boolean
  readonly help: boolean
}

/** The caller's mistake: shown without a stack, exit code 2. */
export class UsageError extends Error {
  override readonly name = 'UsageError'
}

export const help = `npm run bench -- [options]

Measures Spillway beside its peers and the physical limit, on this machine and one PostgreSQL.

  --only a,b           only these sections (--list names them)
  --quick              shorter and less certain
  --database-url URL   a PostgreSQL of yours, as a superuser; else an embedded one in a temporary folder
  --out DIR            where JSON and plots go (bench/results)
  --write              refresh docs/benchmarks.md even from a partial or quick run; a full run does so by itself
  --strict             exit with 1 when a target is missed, not only when a section fails
  --list               name the sections and how long they take
  --help               this
`

const known = {
  only: { type: 'string', multiple: true },
  quick: { type: 'boolean' },
  'database-url': { type: 'string' },
  out: { type: 'string' },
  write: { type: 'boolean' },
  strict: { type: 'boolean' },
  list: { type: 'boolean' },
  help: { type: 'boolean', short: 'h' },
} as const

export function parseOptions(args: readonly string[], sectionNames: readonly string[]): BenchOptions {
  const values = parse(args)
  const only = (values.only ?? []).flatMap((text) => text.split(',')).map((name) => name.trim())
  const unknown = only.filter((name) => !sectionNames.includes(name))
  if (unknown.length > 0) {
    throw new UsageError(
      `There is no section ${unknown.map((name) => JSON.stringify(name)).join(', ')}. There are: ${sectionNames.join(', ')}.`,
    )
  }
  const databaseUrl = values['database-url'] ?? null
  if (databaseUrl !== null && !/^postgres(ql)?:\/\/./.test(databaseUrl)) {
    throw new UsageError('--database-url must look like postgres://user:password@host:5432/database.')
  }
  return {
    only: [...new Set(only)],
    quick: values.quick ?? false,
    databaseUrl,
    out: values.out ?? null,
    write: values.write ?? false,
    strict: values.strict ?? false,
    list: values.list ?? false,
    help: values.help ?? false,
  }
}

function parse(args: readonly string[]) {
  try {
    return parseArgs({ args: [...args], options: known, strict: true, allowPositionals: false }).values
  } catch (fault) {
    const code = fault instanceof Error && 'code' in fault ? String(fault.code) : ''
    if (!code.startsWith('ERR_PARSE_ARGS')) throw fault
    const [said = ''] = (fault as Error).message.split('. ')
    throw new UsageError(`${said.replace(/\.$/, '')}. --help lists the options.`, { cause: fault })
  }
}
