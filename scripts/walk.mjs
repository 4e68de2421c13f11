/**
 * `node scripts/walk.mjs`: the walk of one direct request. Prints the files of our packages in which a function runs while
 * one POST to a mounted definition is accepted, run and answered. Fails if there are more than the limit.
 *
 * V8 counts calls precisely around exactly one request. Timers may run in between, so the walk is what all
 * measurements have in common. On a busy machine a request may last longer than the pause of a timer: it is measured until
 * fifteen measurements in a row have changed nothing.
 */
import { once } from 'node:events'
import { mkdtempSync, rmSync } from 'node:fs'
import { request } from 'node:http'
import { Session } from 'node:inspector/promises'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { pathToFileURL } from 'node:url'
import { root } from './build.mjs'

const filesMax = 30
const unchangedMin = 15
const measurementsMax = 300
const warmUps = 200

const dist = (name) => import(pathToFileURL(path.join(root, 'packages', name, 'dist/index.js')).href)

/** What the library's own package depends on. */
const fromLibrary = createRequire(path.join(root, 'packages/spillway/package.json'))
const installed = (name) => import(pathToFileURL(fromLibrary.resolve(name)).href)

async function startApp(dataDir) {
  const { createIntake, embedded } = await dist('spillway')
  const { default: fastify } = await installed('fastify')
  const { default: Type } = await installed('typebox')
  const intake = await createIntake({ store: embedded({ dataDir }) })
  const placeOrder = intake.define('orders.place', {
    body: Type.Object({ item: Type.String() }),
    run: ({ item }) => ({ placed: item }),
  })
  const app = fastify()
  app.route({ method: 'POST', url: '/orders', ...intake.route(placeOrder) })
  await app.listen({ host: '127.0.0.1', port: 0 })
  return { app, intake, port: app.server.address().port }
}

async function post(port) {
  const headers = { 'content-type': 'application/json' }
  const asked = request({ host: '127.0.0.1', port, method: 'POST', path: '/orders', headers, agent: false })
  asked.end('{"item":"book"}')
  const [answer] = await once(asked, 'response')
  answer.resume()
  await once(answer, 'end')
  if (answer.statusCode !== 201) throw new Error(`the request was answered with ${answer.statusCode}`)
}

/** The files with at least one function that ran. */
function walked({ result }) {
  const files = new Set()
  for (const { url, functions } of result) {
    const file = /packages\/([\w-]+\/dist\/.+)$/.exec(url)?.[1]
    if (file !== undefined && functions.some(({ ranges }) => ranges[0].count > 0)) files.add(file)
  }
  return files
}

async function measure(port) {
  for (let n = 0; n < warmUps; n++) await post(port)
  const session = new Session()
  session.connect()
  await session.post('Profiler.enable')
  await session.post('Profiler.startPreciseCoverage', { callCount: true, detailed: false })
  let files = null
  for (let n = 0, unchanged = 0; n < measurementsMax && unchanged < unchangedMin; n++) {
    await session.post('Profiler.takePreciseCoverage')
    await post(port)
    const walk = walked(await session.post('Profiler.takePreciseCoverage'))
    const before = files ?? [...walk, null]
    files = before.filter((file) => walk.has(file))
    unchanged = files.length === before.length ? unchanged + 1 : 0
  }
  session.disconnect()
  return files.sort()
}

const dataDir = mkdtempSync(path.join(tmpdir(), 'spillway-walk-'))
const { app, intake, port } = await startApp(dataDir)
try {
  const files = await measure(port)
  for (const file of files) console.log(file)
  console.log(`${files.length} files, at most ${filesMax}`)
  if (files.length > filesMax) process.exitCode = 1
} finally {
  await app.close()
  await intake.close()
  rmSync(dataDir, { recursive: true, force: true })
}
