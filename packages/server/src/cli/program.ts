import { Command, CommanderError } from 'commander'
import { ConfigError, isDebugging, loadClientConfig, maskUrlPasswords } from '../config/index.js'
import { version } from '../version.js'
import { createApi, type Filter } from './api.js'
import { purgeDeadLetters, redriveDeadLetters } from './dead-letters.js'
import { exitCodes, UsageError } from './exit.js'
import { changeOperations, printItem, printPage, type Remote } from './operations.js'
import type { Terminal } from './terminal.js'

const hint = 'Run spillway --help, or spillway <command> --help.\n'

/** Runs one command line (without the program's name) and returns its exit code. */
export async function runCli(args: readonly string[], terminal: Terminal): Promise<number> {
  let code: number = exitCodes.done
  const end: End = (outcome) => {
    code = outcome
  }
  try {
    const program = buildProgram(terminal, end)
    const [first] = args
    // Also with --help, where commander would show the help of the program.
    if (first !== undefined && !first.startsWith('-') && !program.commands.some((known) => known.name() === first)) {
      throw new UsageError(`unknown command ${JSON.stringify(first)}`)
    }
    await program.parseAsync(args, { from: 'user' })
    return code
  } catch (error) {
    return report(error, terminal)
  }
}

function report(error: unknown, terminal: Terminal): number {
  if (error instanceof CommanderError) {
    if (error.exitCode === 0) return exitCodes.done
    // Without a command the help was shown instead of an error.
    if (error.code !== 'commander.help') terminal.err(`spillway: ${error.message.replace(/^error: /u, '')}\n${hint}`)
    return exitCodes.usage
  }
  if (isDebugging() && error instanceof Error) terminal.err(`${maskUrlPasswords(error.stack ?? error.message)}\n`)
  else terminal.err(`spillway: ${maskUrlPasswords(messageOf(error))}\n`)
  if (error instanceof UsageError) terminal.err(hint)
  return error instanceof UsageError || error instanceof ConfigError ? exitCodes.usage : exitCodes.failed
}

function messageOf(error: unknown): string {
  if (!(error instanceof Error)) return String(error)
  let deepest = error
  while (deepest.cause instanceof Error) deepest = deepest.cause
  // Some network errors have a code and no message.
  const cause = deepest.message || ('code' in deepest ? String(deepest.code) : '')
  return cause === '' || error.message.includes(cause) ? error.message : `${error.message}\n  because: ${cause}`
}

/** Sets the exit code of the command that ran. */
type End = (code: number) => void

function buildProgram(terminal: Terminal, end: End): Command {
  const program = new Command('spillway')
    .description('The overload-safe front door of a service')
    .version(version, '-v, --version', 'Print the version')
    .helpOption('-h, --help', 'Show this help')
    .helpCommand(false)
    // Commands inherit these: nothing but runCli ends the process, and errors are written by report.
    .exitOverride()
    .configureOutput({ writeOut: terminal.out, writeErr: terminal.err, outputError: () => undefined })
  withExamples(program, ['serve', 'ops list --status failed'])
  addServerCommands(program, terminal, end)
  addOperationCommands(program, terminal, end)
  addDeadLetterCommands(program, terminal, end)
  return program
}

function withExamples(command: Command, lines: readonly string[]): Command {
  const shown = lines.map((line) => `  $ ${line.includes('spillway ') ? line : `spillway ${line}`}\n`)
  return command.addHelpText('after', `\nExamples:\n${shown.join('')}`)
}

/** A command whose own commands do the work. Called without one of them, it names them. */
function addGroup(program: Command, terminal: Terminal, end: End, name: string, description: string): Command {
  const group = program.command(name).description(description).allowExcessArguments()
  group.action(() => {
    terminal.err(`Usage: spillway ${name} <${group.commands.map((command) => command.name()).join('|')}>\n${hint}`)
    end(exitCodes.usage)
  })
  return withExamples(group, [`${name} list --help`])
}

interface ListenOptions {
  host?: string
  port?: string
}

function addServerCommands(program: Command, terminal: Terminal, end: End): void {
  const add = (name: string, description: string, ...examples: readonly string[]): Command =>
    withExamples(program.command(name).description(description), examples)
  const database = 'DATABASE_URL=postgres://localhost/app spillway'
  add(
    'serve',
    'Run the server: API, workers, everything that SPILLWAY_ROLES names',
    'serve --port 8080',
    `${database} serve`,
  )
    .option('--host <address>', 'Address to listen on (SPILLWAY_HOST)')
    .option('--port <number>', 'Port to listen on, 0 for a free one (SPILLWAY_PORT)')
    .action(async (options: ListenOptions) => end(await (await import('./serve.js')).serve(terminal, options)))
  add('worker', 'Work on operations only; listens only if a port is given', `${database} worker`)
    .option('--host <address>', 'Address to listen on (SPILLWAY_HOST)')
    .option('--port <number>', 'Port for health and metrics (SPILLWAY_PORT)')
    .action(async (options: ListenOptions) =>
      end(await (await import('./serve.js')).serve(terminal, { ...options, only: 'worker' })),
    )
  add('migrate', "Bring the database's schema up to date", `${database} migrate`).action(async () =>
    end(await (await import('./migrate.js')).runMigrations(terminal)),
  )
  add('config', 'List every setting: value, source, meaning', 'config')
    .option('--json', 'As JSON, with defaults and what is allowed')
    .action(async ({ json = false }: { json?: boolean }) =>
      end((await import('./show-config.js')).showConfig(terminal, { json })),
    )
  add('doctor', 'Check what a start depends on, and say how to fix it', 'doctor')
    .option('--json', 'As JSON')
    .action(async ({ json = false }: { json?: boolean }) =>
      end(await (await import('./doctor/examine.js')).examine(terminal, { json })),
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

const deadLetterFilter = ['type', 'queue', 'partition', 'identity', 'from', 'to'] as const
const operationFilter = ['status', ...deadLetterFilter] as const

type FilterName = keyof typeof filterOptions

interface RemoteOptions extends Partial<Record<FilterName | 'limit' | 'cursor', string>> {
  url?: string
  key?: string
  json?: boolean
  all?: boolean
}

/** Adds the options of a command that talks to a running server. */
function remote(command: Command, description: string, filter: readonly FilterName[] = []): Command {
  command
    .description(description)
    // Its group allows them.
    .allowExcessArguments(false)
    .option('--url <url>', 'Address of the server (SPILLWAY_URL, else http://127.0.0.1:7745)')
    .option('--key <key>', 'API key or JWT (SPILLWAY_API_KEY keeps it out of the process list)')
    .option('--json', "The server's answer as JSON")
  for (const name of filter) command.option(`--${name} <${name}>`, filterOptions[name])
  return command
}

function remoteOf(terminal: Terminal, { url: given, key, json = false }: RemoteOptions): Remote {
  const settings = loadClientConfig()
  const url = given ?? settings.url
  if (!/^https?:\/\//u.test(url) || !URL.canParse(url)) throw new UsageError('--url must be http://host:port')
  return { api: createApi({ url, key: key ?? settings.apiKey }), terminal, json }
}

function filterOf(options: RemoteOptions): Filter {
  return Object.fromEntries(operationFilter.map((name) => [name, options[name]]))
}

const pageOf = (options: RemoteOptions): Filter => ({
  ...filterOf(options),
  limit: options.limit,
  cursor: options.cursor,
})

function addPaging(command: Command): Command {
  return command.option('--limit <n>', 'At most this many (1 to 200)').option('--cursor <cursor>', 'Go on after a page')
}

const exampleId = '01890a5d-ac96-774b-bcce-b302099a8057'

function addOperationCommands(program: Command, terminal: Terminal, end: End): void {
  const ops = addGroup(program, terminal, end, 'ops', 'List, show, retry or cancel operations')
  const list = addPaging(remote(ops.command('list'), 'List operations', operationFilter))
  list.action(async (options: RemoteOptions) => {
    const server = remoteOf(terminal, options)
    const page = await server.api.listOperations(pageOf(options))
    end(printPage(server, page, ['id', 'type', 'queue', 'partition', 'status', 'attempt', 'created', 'error']))
  })
  withExamples(list, ['ops list --queue orders --status failed'])
  const show = remote(ops.command('show <id>'), 'Show one operation')
    .option('--wait <seconds>', 'Wait until it is finished, at most this long (60)')
    .action(async (id: string, options: RemoteOptions & { wait?: string }) => {
      const server = remoteOf(terminal, options)
      end(printItem(server, await server.api.showOperation(id, options.wait)))
    })
  withExamples(show, [`ops show ${exampleId} --wait 30`])
  for (const action of ['retry', 'cancel'] as const) {
    const description = action === 'retry' ? 'Queue failed operations again' : 'Cancel pending operations'
    const change = remote(ops.command(`${action} <ids...>`), description)
    change.action(async (ids: string[], options: RemoteOptions) =>
      end(await changeOperations(remoteOf(terminal, options), action, ids)),
    )
    withExamples(change, [`ops ${action} ${exampleId}`])
  }
}

function addDeadLetterCommands(program: Command, terminal: Terminal, end: End): void {
  const letters = addGroup(program, terminal, end, 'dead-letters', 'List, show, redrive or purge dead letters')
  const list = addPaging(remote(letters.command('list'), 'List dead letters', deadLetterFilter))
  list.action(async (options: RemoteOptions) => {
    const server = remoteOf(terminal, options)
    const page = await server.api.listDeadLetters(pageOf(options))
    end(printPage(server, page, ['id', 'type', 'queue', 'partition', 'attempt', 'created', 'error']))
  })
  withExamples(list, ['dead-letters list --queue orders'])
  const show = remote(letters.command('show <id>'), 'Show one dead letter, with its payload')
  show.action(async (id: string, options: RemoteOptions) => {
    const server = remoteOf(terminal, options)
    end(printItem(server, await server.api.showDeadLetter(id)))
  })
  withExamples(show, [`dead-letters show ${exampleId}`])
  const redrive = remote(letters.command('redrive [ids...]'), 'Queue dead letters again, in order', deadLetterFilter)
    .option('--all', 'All of them')
    .action(async (ids: string[], options: RemoteOptions) => {
      const which = { ids, filter: filterOf(options), all: options.all === true }
      end(await redriveDeadLetters(remoteOf(terminal, options), which))
    })
  withExamples(redrive, [`dead-letters redrive ${exampleId}`, 'dead-letters redrive --queue orders'])
  const purge = remote(letters.command('purge'), 'Delete dead letters for good', deadLetterFilter)
    .option('--all', 'All of them')
    .option('--yes', 'Do it: without this nothing is deleted')
    .action(async (options: RemoteOptions & { yes?: boolean }) => {
      const which = { filter: filterOf(options), all: options.all === true, yes: options.yes === true }
      end(await purgeDeadLetters(remoteOf(terminal, options), which))
    })
  withExamples(purge, ['dead-letters purge --queue orders --yes'])
}
