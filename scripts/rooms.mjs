/**
 * Who may import whom. The rules of the rooms are data; `violations` reads one file's imports against them.
 * Imports point inward: protocol ← everything; the core knows neither HTTP nor a driver.
 */
import path from 'node:path'

/** A driver (or framework) and the only rooms that may touch it, types included. */
const confined = [
  { packages: /^pg(\/|$|-)/, to: ['store'] },
  {
    packages: /^(fastify$|fastify\/|fastify-plugin|@fastify\/)/,
    to: ['http', 'app', 'openapi', 'request-state', 'allowed-methods', 'auth'],
  },
  { packages: /^ioredis(\/|$)/, to: ['brokers'] },
  { packages: /^@nats-io\//, to: ['brokers'] },
  { packages: /^commander(\/|$)/, to: ['cli'] },
  { packages: /^@spillway\/embedded-postgres(\/|$)/, to: ['store', 'serve', 'cli'] },
]
const drivers = /^(pg|fastify|undici|ioredis|commander)(\/|$)|^(pg-|@fastify\/|@nats-io\/)/

const core = { neverRooms: ['http'], neverPackages: drivers }
const outer = ['app', 'serve', 'auth', 'traffic', 'workloads', 'brokers', 'cli']
/** What is between the socket and a workload. */
const front = { neverRooms: ['cli', 'serve', 'workloads', 'brokers'] }

/**
 * Rooms of the packages that have them. `neverRooms`, `neverPackages` forbid; `onlyRooms`, `onlyPackages` allow nothing else;
 * `except` are files that may be imported all the same; `typesFrom` are rooms of which only types may be taken; `apart`: its
 * folders do not know each other. A room always sees itself.
 * 'index' and 'workload' are the surface files of the library.
 */
const rooms = {
  spillway: {
    core,
    time: { onlyRooms: [], onlyPackages: /^$/ },
    intake: { neverPackages: drivers },
    accept: core,
    work: core,
    fleet: core,
    maintenance: core,
    streams: core,
    ledger: core,
    pressure: core,
    gates: {
      onlyRooms: ['core'],
      typesFrom: ['intake', 'fleet', 'store'],
      onlyPackages: /^@spillway\/protocol(\/|$)/,
    },
    store: { neverRooms: ['http'] },
    metrics: { neverRooms: ['http'] },
    http: {},
    index: {},
    workload: {},
    testing: {},
    version: { onlyRooms: [] },
  },
  server: {
    config: { neverRooms: outer, except: /^workloads\/[\w-]+\/settings\.js$/ },
    prometheus: { neverRooms: outer },
    logs: { neverRooms: outer },
    brokers: { neverRooms: outer },
    auth: { onlyRooms: ['config'] },
    traffic: { onlyRooms: [] },
    app: front,
    'request-state': front,
    'route-table': front,
    'allowed-methods': front,
    'short-path': front,
    health: front,
    openapi: front,
    landing: front,
    demo: front,
    workload: {
      onlyRooms: [],
      typesFrom: ['config', 'health', 'logs', 'traffic'],
    },
    workloads: {
      onlyRooms: ['auth', 'traffic', 'brokers', 'time', 'route-table'],
      typesFrom: ['app', 'config', 'health', 'workload'],
      apart: true,
    },
    'workload-list': { onlyRooms: ['workloads'], typesFrom: ['workload'] },
    serve: { neverRooms: ['cli'] },
    time: { onlyRooms: [] },
    internal: {},
    version: { onlyRooms: [] },
    cli: {},
  },
}

/** The only files that read the environment: main.ts hands it to config, programs.ts hands PATH to PostgreSQL, tests have no config. */
const environmentReaders = {
  spillway: /^testing\/test-intake\.ts$/,
  server: /^(config\/|cli\/main\.ts$)/,
  'embedded-postgres': /^programs\.ts$/,
}

/** What each package may take from the others; `packages` limits what comes from outside too. */
const packageRules = {
  protocol: { ours: /^$/ },
  client: { ours: /^@spillway\/protocol\/wire$/, packages: /^$/ },
  'embedded-postgres': { ours: /^$/, packages: /^(node:|pg$)/ },
  console: { ours: /^@spillway\/client$/ },
  spillway: {
    ours: /^@spillway\/(protocol\/(wire|schema)|embedded-postgres)$/,
    // The library is light: whatever else it imports, its users install.
    packages: /^(node:|(pg|croner|typebox|fastify)(\/|$)|@opentelemetry\/api$)/,
  },
  server: { ours: /^(spillway\/workload|@spillway\/(protocol\/(wire|schema)|embedded-postgres))$/ },
}

/** Comments and template literals are blanked, strings and regular expressions stepped over. */
const tokens =
  /\/\*[\s\S]*?\*\/|\/\/[^\n]*|(?<=(?:^|[(,=:[!&|?{};\n]|\breturn)[^\S\n]*)\/(?![*/])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n[])+\/|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"|`(?:\\[\s\S]|[^`\\])*`/g
const named = String.raw`\{[^}]*\}`
const clause = String.raw`(?:[\w$]+\s*,?\s*)?(?:${named}|\*(?:\s*as\s+[\w$]+)?)?\s*from\s*`
const statement = new RegExp(
  String.raw`(?:^|[;\n}])[^\S\n]*(?:import|export)\b\s*(type\b(?!\s*(?:from\b|,))\s*)?(?:${clause})?(['"])([^'"\n]+)\2`,
  'g',
)
const call = /\b(?:import|require(?:\.resolve)?)\s*\(\s*(['"])([^'"\n]+)\1/g

function blanked(source) {
  return source.replace(tokens, (token) => {
    if (token.startsWith("'") || token.startsWith('"')) return token
    if (token.startsWith('/') && !token.startsWith('/*') && !token.startsWith('//')) return '/ /'
    return token.replace(/[^\n]/g, ' ')
  })
}

/** Every module that a source text names: `{ specifier, typeOnly, line }`. */
export function importsOf(source) {
  const text = blanked(source)
  const lineAt = (index) => text.slice(0, index).split('\n').length
  const found = []
  for (const match of text.matchAll(statement)) {
    found.push({ specifier: match[3], typeOnly: Boolean(match[1]), line: lineAt(match.index + match[0].length) })
  }
  for (const match of text.matchAll(call)) {
    found.push({ specifier: match[2], typeOnly: false, line: lineAt(match.index) })
  }
  return found.sort((a, b) => a.line - b.line)
}

function readsEnvironment(source) {
  const text = blanked(source)
  return (
    /\bprocess\s*\??\.\s*env\b|\bprocess\s*\[\s*['"]env|\{[^}]*\benv\b[^}]*\}\s*=\s*process\b/.test(text) ||
    /import\s*\{[^}]*\benv\b[^}]*\}\s*from\s*['"](node:)?process['"]/.test(text)
  )
}

const isTest = (file) => /\.test\.m?ts$/.test(file)

function roomOf(inSource) {
  const [first, ...rest] = inSource.split('/')
  return rest.length > 0 ? first : first.replace(/(\.test)?\.m?[jt]s$/, '')
}

function roomFault({ rule, room, inSource, target, typeOnly }) {
  const targetRoom = roomOf(target)
  if (targetRoom === room) {
    const sibling = rule.apart && target.split('/')[1] !== inSource.split('/')[1]
    return sibling ? `${inSource.split('/').slice(0, 2).join('/')} may not import a neighbour` : undefined
  }
  if (rule.except?.test(target)) return undefined
  if (rule.typesFrom?.includes(targetRoom))
    return typeOnly ? undefined : `${room} may take only types from ${targetRoom}`
  if (rule.onlyRooms && !rule.onlyRooms.includes(targetRoom)) return `${room} may not import from ${targetRoom}`
  if (rule.neverRooms?.includes(targetRoom)) return `${room} may not import from ${targetRoom}`
  return undefined
}

function outsideFault({ packageName, rule, room, specifier, test }) {
  const own = packageRules[packageName]
  if (/^(@spillway\/|spillway(\/|$))/.test(specifier)) {
    if (!own.ours.test(specifier)) return `packages/${packageName} may not import ${specifier}`
  } else if (!test) {
    if (own.packages && !own.packages.test(specifier)) return `packages/${packageName} may not import ${specifier}`
    if (rule?.onlyPackages && !rule.onlyPackages.test(specifier)) return `${room} may not import ${specifier}`
  }
  if (rule === undefined) return undefined
  if (rule.neverPackages?.test(specifier)) return `${room} may not import the driver ${specifier}`
  const home = confined.find(({ packages }) => packages.test(specifier))
  if (home && !home.to.includes(room)) return `${specifier} is for ${home.to.join(', ')} only`
  return undefined
}

/**
 * What is wrong in one file of packages/<name>/(src|test). `file` is relative to the repository's root, with `/`.
 * Unit tests keep to the package, its neighbours and the drivers' homes, but may set up what their room may not import.
 */
export function violations(file, source) {
  const [, packageName, top, ...rest] = file.split('/')
  const faults = []
  const report = (line, message) => faults.push({ file, line, message })
  const inSource = top === 'src' ? rest.join('/') : undefined
  const test = isTest(file)
  const room = inSource && rooms[packageName] ? roomOf(inSource) : undefined
  const rule = room ? rooms[packageName][room] : undefined
  if (room && !rule) report(1, `${room} is no room: name it in scripts/rooms.mjs`)

  for (const { specifier, typeOnly, line } of importsOf(source)) {
    if (!specifier.startsWith('.')) {
      if (!inSource) continue
      const fault = outsideFault({ packageName, rule, room, specifier, test })
      if (fault) report(line, fault)
      continue
    }
    const resolved = path.posix.join(path.posix.dirname(file), specifier)
    // Tests of the server use fixtures of the library, and look into both.
    if (packageName === 'server' && top === 'test' && resolved.startsWith('packages/spillway/')) continue
    if (!resolved.startsWith(`packages/${packageName}/`)) {
      report(line, `${specifier} leaves packages/${packageName}`)
      continue
    }
    if (!inSource) continue
    const src = `packages/${packageName}/src/`
    if (!resolved.startsWith(src)) {
      if (!test && !resolved.endsWith('/package.json')) report(line, `${specifier} leaves src`)
      continue
    }
    const target = resolved.slice(src.length)
    if (packageName === 'protocol' && inSource.startsWith('wire/') && !target.startsWith('wire/')) {
      report(line, 'wire is plain TypeScript: it may not import schema')
    }
    if (!rule || test) continue
    const fault = roomFault({ rule, room, inSource, target, typeOnly })
    if (fault) report(line, fault)
  }

  if (inSource && packageName === 'protocol' && inSource.startsWith('wire/') && !test) {
    for (const { specifier, line } of importsOf(source)) {
      if (!specifier.startsWith('.')) report(line, `wire is plain TypeScript: it may not import ${specifier}`)
    }
  }
  const readers = inSource && !test ? environmentReaders[packageName] : undefined
  if (readers && !readers.test(inSource) && readsEnvironment(source)) {
    report(
      1,
      `the environment is read in ${packageName === 'embedded-postgres' ? 'programs.ts' : "the server's config"} only`,
    )
  }
  return faults
}
