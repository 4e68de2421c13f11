/**
 * packages/spillway/schema.sql is what the .sql files of the core and of all workloads make of an empty database, for reading
 * and for review.
 * Compares it with a fresh dump; `--write` renews it. Reads dist: build first.
 */
import { chmodSync, existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { pathToFileURL } from 'node:url'
import { root } from './build.mjs'
import { firstDifference } from './first-difference.mjs'
import { dumpSchema } from './schema-catalog.mjs'

const schema = 'spillway'
const file = path.join(root, 'packages/spillway/schema.sql')
const header = `-- Made from the .sql files by \`node scripts/schema-dump.mjs --write\`; not meant to be run or edited.\n\n`

const built = (name) => import(pathToFileURL(path.join(root, 'packages', name)).href)
const pg = createRequire(path.join(root, 'packages/spillway/package.json'))('pg')

async function freshDump() {
  const { startEmbedded } = await built('embedded-postgres/dist/index.js')
  const { migrate } = await built('spillway/dist/store/postgres/migrate.js')
  const { coreSql } = await built('spillway/dist/store/postgres/generated/sql.js')
  const { workloadSql } = await built('server/dist/http/workload-sql.js')
  const log = { info: () => undefined, warn: console.error, error: console.error }
  const dir = mkdtempSync(path.join(tmpdir(), 'spillway-schema-'))
  // As root the server runs under another account, which must be able to enter.
  chmodSync(dir, 0o755)
  const server = await startEmbedded({ dataDir: path.join(dir, 'data'), log })
  try {
    await migrate({ url: server.url, schema, sql: [coreSql, ...workloadSql], log })
    const client = new pg.Client({ connectionString: server.url })
    await client.connect()
    try {
      return header + (await dumpSchema(client, schema))
    } finally {
      await client.end()
    }
  } finally {
    await server.stop()
    rmSync(dir, { recursive: true, force: true, maxRetries: 5, retryDelay: 200 })
  }
}

const dump = await freshDump()
if (process.argv.includes('--write')) {
  writeFileSync(file, dump)
} else {
  const committed = existsSync(file) ? readFileSync(file, 'utf8') : ''
  const difference = firstDifference(committed, dump)
  if (difference) {
    console.error(`packages/spillway/schema.sql:${difference.line} is not what the .sql files make`)
    console.error(`  in the file:     ${difference.left ?? '(ends here)'}`)
    console.error(`  from .sql files: ${difference.right ?? '(ends here)'}`)
    console.error('If the .sql files are right: node scripts/schema-dump.mjs --write')
    process.exitCode = 1
  }
}
