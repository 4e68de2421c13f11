import { type CAC, cac } from 'cac'
import { ConfigError, isDebugging, loadClientConfig, maskUrlPasswords } from '../config/index.js'
import { version } from '../version.js'
import { type Api, createApi, type Filter } from './api.js'
import { exitCodes, UsageError } from './exit.js'
import type { Terminal } from './terminal.js'

/** Two-word commands. cac matches one word, so the two are joined before it sees them. */
const groups: Readonly<Record<string, readonly string[]>> = {
  ops: ['list', 'show', 'retry', 'cancel'],
  'dead-letters': ['list', 'show', 'redrive', 'purge'],
}

/** Runs one command line (without the program's name) and returns its exit code. */
export async function runCli(args: readonly string[], terminal: Terminal): Promise<number> {
  try {
    const words = joinGroup(args)
    return await dispatch(buildProgram(words, terminal), words, terminal)
  } catch (error) {
    return report(error, terminal)
  }
}

function joinGroup(args: readonly string[]): string[] {
  const [group = '', action, ...rest] = args
  const actions = Object.hasOwn(groups, group) ? groups[group] : undefined
  if (actions === undefined) return [...args]
  if (action !== undefined && actions.includes(action)) return [`${group} ${action}`, ...rest]
  if (action === '--help' || action === '-h') return [group, action]
  const given = action === undefined || action.startsWith('-') ? 'nothing' : JSON.stringify(action)
  throw new UsageError(`${group} wants one of ${actions.join(', ')}; given: ${given}`)
}

async function dispatch(program: CAC, words: string[], terminal: Terminal): Promise<number> {
  const [first] = words
  if (first !== undefined && !first.startsWith('-') && !program.commands.some((command) => command.isMatched(first))) {
    throw new UsageError(`unknown command ${JSON.stringify(first)}`)
  }
  program.parse(['node', 'spillway', ...words], { run: false })
  if (program.options.help === true) return exitCodes.done
  if (program.matchedCommand !== undefined) {
    const outcome: unknown = await program.runMatchedCommand()
    return typeof outcome === 'number' ? outcome : exitCodes.done
  }
  if (program.options.version === true) {
    terminal.out(`${version}\n`)
    return exitCodes.done
  }
  if (first !== undefined) throw new UsageError(`unknown option ${first}`)
  program.outputHelp()
  return exitCodes.usage
}

function report(error: unknown, terminal: Terminal): number {
  if (isDebugging() && error instanceof Error) terminal.err(`${maskUrlPasswords(error.stack ?? error.message)}\n`)
  else terminal.err(`spillway: ${maskUrlPasswords(messageOf(error))}\n`)
  // cac's own errors (unknown option, missing argument) are recognised by name: it does not export their class.
  const usage = error instanceof UsageError || (error instanceof Error && error.name === 'CACError')
  if (usage) terminal.err('Run spillway --help, or spillway <command> --help.\n')
  return usage || error instanceof ConfigError ? exitCodes.usage : exitCodes.failed
}

function messageOf(error: unknown): string {
  if (!(error instanceof Error)) return String(error)
  let deepest = error
  while (deepest.cause instanceof Error) deepest = deepest.cause
  // Some network errors have a code and no message.
  const cause = deepest.message || ('code' in deepest ? String(deepest.code) : '')
  return cause === '' || error.message.includes(cause) ? error.message : `${error.message}\n  because: ${cause}`
}

/** The text of an option as it was typed: cac turns "007" into 7. The last one wins. */
function textOf(words: readonly string[], option: string): string | undefined {
  const equals = `--${option}=`
  for (let index = words.length - 1; index > 0; index--) {
    const word = words[index]
    if (word?.startsWith(equals)) return word.slice(equals.length)
    if (word === `--${option}`) return words[index + 1]
  }
  return undefined
}

function buildProgram(words: readonly string[], terminal: Terminal): CAC {
  const program = cac('spillway')
  const text = (option: string) => textOf(words, option)
  addServerCommands(program, terminal, text)
  addOperationCommands(program, terminal, text)
  addDeadLetterCommands(program, terminal, text)
  // A group is registered as a command only for its own help: the list names its commands one by one.
  const [group = ''] = words
  const actions = Object.hasOwn(groups, group) ? groups[group] : undefined
  if (actions !== undefined) {
    const usage = program.command(group, '').usage(`${group} <${actions.join('|')}> [options]`)
    for (const action of actions) usage.example(`  $ spillway ${group} ${action} --help`)
  }
  program.option('-v, --version', 'Print the version')
  program.example('  $ spillway serve')
  program.example('  $ spillway ops list --status failed')
  // With --help cac would repeat the whole list of commands.
  program.help((sections) =>
    sections.map((section) =>
      section.title?.startsWith('For more info') ? { title: 'More', body: '  $ spillway <command> --help' } : section,
    ),
  )
  return program
}

type Text = (option: string) => string | undefined

function addServerCommands(program: CAC, terminal: Terminal, text: Text): void {
  program
    .command('serve', 'Run the server: API, workers, everything that SPILLWAY_ROLES names')
    .option('--host <address>', 'Address to listen on (SPILLWAY_HOST)')
    .option('--port <number>', 'Port to listen on, 0 for a free one (SPILLWAY_PORT)')
    .example('  $ spillway serve --port 8080')
    .example('  $ DATABASE_URL=postgres://localhost/app spillway serve')
    .action(async () => (await import('./serve.js')).serve(terminal, { host: text('host'), port: text('port') }))
  program
    .command('worker', 'Work on operations only; listens only if a port is given')
    .option('--host <address>', 'Address to listen on (SPILLWAY_HOST)')
    .option('--port <number>', 'Port for health and metrics (SPILLWAY_PORT)')
    .example('  $ DATABASE_URL=postgres://localhost/app spillway worker')
    .action(async () =>
      (await import('./serve.js')).serve(terminal, { only: 'worker', host: text('host'), port: text('port') }),
    )
  program
    .command('migrate', "Bring the database's schema up to date")
    .example('  $ DATABASE_URL=postgres://localhost/app spillway migrate')
    .action(async () => (await import('./migrate.js')).runMigrations(terminal))
  program
    .command('config', 'List every setting: value, source, meaning')
    .option('--json', 'As JSON, with defaults and what is allowed')
    .example('  $ spillway config')
    .action(async ({ json }: { json?: boolean }) =>
      (await import('./show-config.js')).showConfig(terminal, { json: json === true }),
    )
  program
    .command('doctor', 'Check what a start depends on, and say how to fix it')
    .option('--json', 'As JSON')
    .example('  $ spillway doctor')
    .action(async ({ json }: { json?: boolean }) =>
      (await import('./doctor/examine.js')).examine(terminal, { json: json === true }),
    )
}

const filterOptions = {
  status: 'pending, processing, completed, failed or cancelled',
  type: 'Operation type',
  queue: 'Queue name',
  partition: 'Partition name',
  identity: 'Who handed it over',
  from: 'Accepted at or after (RFC 3339)',
  to: 'Accepted before (RFC 3339)',
} as const

function filterOf(text: Text, names: readonly string[]): Filter {
  return Object.fromEntries(names.map((name) => [name, text(name)]))
}

const deadLetterFilter = ['type', 'queue', 'partition', 'identity', 'from', 'to'] as const
const operationFilter = ['status', ...deadLetterFilter] as const

interface Remote {
  readonly api: Api
  readonly terminal: Terminal
  readonly json: boolean
}

/** A command that talks to a running server. */
function remoteCommand(
  program: CAC,
  rawName: string,
  description: string,
  filter: readonly (keyof typeof filterOptions)[],
) {
  const command = program
    .command(rawName, description)
    .option('--url <url>', 'Address of the server (SPILLWAY_URL, else http://127.0.0.1:7745)')
    .option('--key <key>', 'API key or JWT (SPILLWAY_API_KEY keeps it out of the process list)')
    .option('--json', "The server's answer as JSON")
  for (const name of filter) command.option(`--${name} <${name}>`, filterOptions[name])
  return command
}

function remoteOf(terminal: Terminal, text: Text, options: { json?: boolean }): Remote {
  const settings = loadClientConfig()
  const url = text('url') ?? settings.url
  if (!/^https?:\/\//u.test(url) || !URL.canParse(url)) throw new UsageError('--url wants http://host:port')
  return { api: createApi({ url, key: text('key') ?? settings.apiKey }), terminal, json: options.json === true }
}

function addOperationCommands(program: CAC, terminal: Terminal, text: Text): void {
  remoteCommand(program, 'ops list', 'List operations', operationFilter)
    .option('--limit <n>', 'At most this many (1 to 200)')
    .option('--cursor <cursor>', 'Go on after a page')
    .example('  $ spillway ops list --queue orders --status failed')
    .action(async (options: { json?: boolean }) =>
      (await import('./operations.js')).listOperations(
        remoteOf(terminal, text, options),
        filterOf(text, [...operationFilter, 'limit', 'cursor']),
      ),
    )
  remoteCommand(program, 'ops show <id>', 'Show one operation', [])
    .option('--wait <seconds>', 'Wait until it is finished, at most this long (60)')
    .example('  $ spillway ops show 01890a5d-ac96-774b-bcce-b302099a8057 --wait 30')
    .action(async (id: string, options: { json?: boolean }) =>
      (await import('./operations.js')).showOperation(remoteOf(terminal, text, options), id, text('wait')),
    )
  for (const action of ['retry', 'cancel'] as const) {
    const description = action === 'retry' ? 'Queue failed operations again' : 'Cancel pending operations'
    remoteCommand(program, `ops ${action} <id> [...more]`, description, [])
      .example(`  $ spillway ops ${action} 01890a5d-ac96-774b-bcce-b302099a8057`)
      .action(async (id: string, more: string[], options: { json?: boolean }) =>
        (await import('./operations.js')).changeOperations(remoteOf(terminal, text, options), action, [id, ...more]),
      )
  }
}

function addDeadLetterCommands(program: CAC, terminal: Terminal, text: Text): void {
  remoteCommand(program, 'dead-letters list', 'List dead letters', deadLetterFilter)
    .option('--limit <n>', 'At most this many (1 to 200)')
    .option('--cursor <cursor>', 'Go on after a page')
    .example('  $ spillway dead-letters list --queue orders')
    .action(async (options: { json?: boolean }) =>
      (await import('./dead-letters.js')).listDeadLetters(
        remoteOf(terminal, text, options),
        filterOf(text, [...deadLetterFilter, 'limit', 'cursor']),
      ),
    )
  remoteCommand(program, 'dead-letters show <id>', 'Show one dead letter, with its payload', [])
    .example('  $ spillway dead-letters show 01890a5d-ac96-774b-bcce-b302099a8057')
    .action(async (id: string, options: { json?: boolean }) =>
      (await import('./dead-letters.js')).showDeadLetter(remoteOf(terminal, text, options), String(id)),
    )
  remoteCommand(program, 'dead-letters redrive [...ids]', 'Queue dead letters again, in order', deadLetterFilter)
    .option('--all', 'All of them')
    .example('  $ spillway dead-letters redrive 01890a5d-ac96-774b-bcce-b302099a8057')
    .example('  $ spillway dead-letters redrive --queue orders')
    .action(async (ids: string[], options: { json?: boolean; all?: boolean }) =>
      (await import('./dead-letters.js')).redriveDeadLetters(remoteOf(terminal, text, options), {
        ids,
        filter: filterOf(text, deadLetterFilter),
        all: options.all === true,
      }),
    )
  remoteCommand(program, 'dead-letters purge', 'Delete dead letters for good', deadLetterFilter)
    .option('--all', 'All of them')
    .option('--yes', 'Do it: without this nothing is deleted')
    .example('  $ spillway dead-letters purge --queue orders --yes')
    .action(async (options: { json?: boolean; all?: boolean; yes?: boolean }) =>
      (await import('./dead-letters.js')).purgeDeadLetters(remoteOf(terminal, text, options), {
        filter: filterOf(text, deadLetterFilter),
        all: options.all === true,
        yes: options.yes === true,
      }),
    )
}
