/**
 * Keeps docs/reference true to the program.
 *
 *   node scripts/generate-docs.mjs                    writes the tables of settings.md and metrics.md
 *   node scripts/generate-docs.mjs --check            fails if the settings are stale; reads only the built command
 *   node scripts/generate-docs.mjs --check <origin>   compares settings, metrics and routes with a running server
 *
 * A table is between `<!-- generated: name -->` and `<!-- end -->`. The text around it, and http.md, are written by hand.
 */
import { execFileSync, spawn } from 'node:child_process'
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { root } from './build.mjs'

const command = path.join(root, 'packages/server/dist/cli/main.js')
const reference = (name) => path.join(root, 'docs/reference', name)
const read = (name) => readFileSync(reference(name), 'utf8')
/** No setting of the caller's shell is used. */
const environment = { PATH: process.env.PATH ?? '', HOME: process.env.HOME ?? '/' }

/** A name belongs to the first group with a prefix that fits. */
const settingGroups = {
  petitions: /^PETITION_/,
  messages: /^SPILLWAY_(PUSH_PENDING_MAX|GROUPS_PER_QUEUE_MAX|ENCRYPTION_KEY)$/,
  routing: /^(NATS_URL|ROUTER_|GATEWAY_|BACKPRESSURE_)/,
  alerts: /^ALERT_/,
  generation: /^(REDIS_URL|GENERATION_|CONNECTION_POOL_|QUEUE_FAILOVER_|STREAM_)/,
  authentication: /^SPILLWAY_(API_KEYS|JW|PROTECT_METRICS)/,
  database: /^(DATABASE_URL|SPILLWAY_(LISTEN_URL|DB_SCHEMA|DATA_DIR|POOL_|STORE_))/,
  server:
    /^SPILLWAY_(HOST|PORT|BODY_|PAGE_|REQUEST_|HEADERS_|CONNECTIONS_|BUFFER_|DRAIN_|TRUSTED_|CORS_|ALLOWED_|ROLES|LOG_)/,
  operations: /./,
}

const metricGroups = {
  petitions: /^petition_/,
  messages: /^spillway_messages_/,
  routing: /^(router|gateway)_/,
  alerts: /^spillway_(alert|slo)/,
  generation: /^(sse|generation)_/,
  server: /^spillway_(http|buffer|unread)/,
  operations: /./,
}

/** The client library for Prometheus adds these; metrics.md says so in one sentence. */
const runtimeMetrics = /^(process|nodejs)_/

const cell = (text) => String(text).replaceAll('|', '\\|')

function table(head, rows) {
  const line = (cells) => `| ${cells.map(cell).join(' | ')} |\n`
  return line(head) + line(head.map(() => '---')).replaceAll(' ', '') + rows.map(line).join('')
}

function grouped(groups, entries, name) {
  const found = Object.fromEntries(Object.keys(groups).map((group) => [group, []]))
  for (const entry of entries) {
    const [group] = Object.entries(groups).find(([, pattern]) => pattern.test(name(entry)))
    found[group].push(entry)
  }
  return found
}

function settingTables() {
  const settings = JSON.parse(execFileSync(process.execPath, [command, 'config', '--json'], { env: environment }))
  const row = ({ name, default: initial, allowed, meaning }) => [
    `\`${name}\``,
    initial === '' ? 'not set' : `\`${initial}\``,
    allowed,
    meaning,
  ]
  const groups = grouped(settingGroups, settings, ({ name }) => name)
  return Object.fromEntries(
    Object.entries(groups).map(([group, found]) => [
      group,
      table(['name', 'default', 'allowed', 'meaning'], found.map(row)),
    ]),
  )
}

function metricTables(scrape) {
  const types = new Map([...scrape.matchAll(/^# TYPE (\S+) (\S+)$/gm)].map(([, name, type]) => [name, type]))
  const metrics = [...scrape.matchAll(/^# HELP (\S+) (.+)$/gm)]
    .map(([, name, meaning]) => ({ name, meaning }))
    .filter(({ name }) => !runtimeMetrics.test(name))
    .sort((a, b) => (a.name < b.name ? -1 : 1))
  const row = ({ name, meaning }) => [`\`${name}\``, types.get(name), meaning]
  const groups = grouped(metricGroups, metrics, ({ name }) => name)
  return Object.fromEntries(
    Object.entries(groups).map(([group, found]) => [group, table(['name', 'type', 'meaning'], found.map(row))]),
  )
}

/** The page with these tables in their places. */
function filled(page, tables) {
  const missing = new Set(Object.keys(tables))
  const text = read(page).replace(/(<!-- generated: (\w+) -->\n)[\s\S]*?(<!-- end -->)/g, (whole, begin, name, end) => {
    missing.delete(name)
    return tables[name] === undefined ? whole : `${begin}\n${tables[name]}\n${end}`
  })
  if (missing.size > 0) throw new Error(`docs/reference/${page} has no place for: ${[...missing].join(', ')}`)
  return text
}

const staleFaults = (page, tables) =>
  filled(page, tables) === read(page) ? [] : [`docs/reference/${page} is stale: run node scripts/generate-docs.mjs`]

/** `{ 'GET /health': 'none' }` from the OpenAPI document: the first role that a route needs, or all that it accepts. */
function servedRoutes({ paths }) {
  const routes = {}
  for (const [route, methods] of Object.entries(paths)) {
    for (const [method, { description = '' }] of Object.entries(methods)) {
      const access = description.split('\n').at(-1)
      const roles = [...access.matchAll(/`(\w+)`/g)].map(([, role]) => role)
      const needed = /^Open to all/.test(access) ? 'none' : /^Any role/.test(access) ? 'any' : roles.join(', ')
      routes[`${method.toUpperCase()} ${route}`] = needed
    }
  }
  return routes
}

/** The same from the rows of http.md: | `GET /path` | role | answers | what it does |. */
function documentedRoutes(markdown) {
  const row = /^\| `([A-Z]+ \/\S*)` \| ([^|]+?) \| [^|]+ \| [^|]+ \|$/gm
  return Object.fromEntries([...markdown.matchAll(row)].map(([, route, role]) => [route, role.replaceAll('`', '')]))
}

function routeFaults(served, documented) {
  const faults = []
  for (const [route, role] of Object.entries(served)) {
    const written = documented[route]
    if (written === undefined) faults.push(`docs/reference/http.md lacks ${route} (role: ${role})`)
    else if (written !== role) faults.push(`docs/reference/http.md: ${route} needs the role ${role}, not ${written}`)
  }
  for (const route of Object.keys(documented)) {
    if (served[route] === undefined) faults.push(`docs/reference/http.md: the server has no ${route}`)
  }
  return faults
}

async function fetched(url) {
  const answer = await fetch(url)
  if (!answer.ok) throw new Error(`${url}: ${answer.status}`)
  return answer.text()
}

/** A server on the embedded PostgreSQL, for one scrape. */
async function withServer(use) {
  const folder = mkdtempSync(path.join(tmpdir(), 'spillway-docs-'))
  const server = spawn(process.execPath, [command, 'serve'], {
    env: { ...environment, SPILLWAY_PORT: '0', SPILLWAY_DATA_DIR: folder },
    stdio: ['ignore', 'ignore', 'pipe'],
  })
  const ended = new Promise((resolve) => server.once('close', resolve))
  try {
    const origin = await new Promise((resolve, reject) => {
      let written = ''
      server.stderr.setEncoding('utf8').on('data', (text) => {
        written += text
        const found = /listens on (http:\/\/\S+)/.exec(written)?.[1]
        if (found !== undefined) resolve(found)
      })
      void ended.then(() => reject(new Error(`the server ended: ${written}`)))
    })
    return await use(origin)
  } finally {
    server.kill('SIGTERM')
    await ended
    rmSync(folder, { recursive: true, force: true })
  }
}

const [mode, origin] = process.argv.slice(2)
if (mode === '--check') {
  const faults = staleFaults('settings.md', settingTables())
  if (origin !== undefined) {
    faults.push(...staleFaults('metrics.md', metricTables(await fetched(`${origin}/metrics`))))
    const openapi = JSON.parse(await fetched(`${origin}/openapi.json`))
    faults.push(...routeFaults(servedRoutes(openapi), documentedRoutes(read('http.md'))))
  }
  for (const fault of faults) console.error(fault)
  process.exitCode = faults.length > 0 ? 1 : 0
} else {
  writeFileSync(reference('settings.md'), filled('settings.md', settingTables()))
  const scrape = await withServer((at) => fetched(`${at}/metrics`))
  writeFileSync(reference('metrics.md'), filled('metrics.md', metricTables(scrape)))
}
