/**
 * Makes TypeScript modules from the .sql files, because tsc copies none. Each folder named `sql` in a package's sources
 * belongs to one owner (the core, or a workload) and becomes `generated/sql.ts` beside it. Part of the build; with
 * `--check` it writes nothing and fails if a module is stale.
 */
import { existsSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs'
import path from 'node:path'
import { pathToFileURL } from 'node:url'

const root = path.resolve(import.meta.dirname, '..')
const columnsMax = 120
const functionLinesMax = 90
/** Measured: cut into steps they cost more. The head of each says how much. */
const longFunctions = ['mq_pop']

const sqlFiles = (dir) =>
  existsSync(dir)
    ? readdirSync(dir)
        .filter((name) => name.endsWith('.sql'))
        .sort()
    : []

function sqlFolders() {
  const packages = readdirSync(path.join(root, 'packages'))
  return packages
    .flatMap((name) => {
      const src = path.join(root, 'packages', name, 'src')
      if (!existsSync(src)) return []
      const entries = readdirSync(src, { recursive: true, withFileTypes: true })
      return entries.filter((e) => e.isDirectory() && e.name === 'sql').map((e) => path.join(e.parentPath, e.name))
    })
    .sort()
}

/** The core's folder is named after the database; a workload's after the workload. */
const ownerOf = (folder) => {
  const name = path.basename(path.dirname(folder))
  return name === 'postgres' ? 'core' : name
}

const literal = (text) => `\`${text.replace(/[\\`]|\$\{/g, '\\$&')}\``

function moduleOf(folder) {
  const owner = ownerOf(folder)
  const read = (kind) =>
    sqlFiles(path.join(folder, kind)).map((file) => ({
      name: file.slice(0, -'.sql'.length),
      sql: readFileSync(path.join(folder, kind, file), 'utf8'),
    }))
  const list = (key, files) =>
    `  ${key}: [\n${files.map(({ name, sql }) => `    {\n      ${key === 'tables' ? 'id' : 'name'}: '${name}',\n      sql: ${literal(sql)},\n    },\n`).join('')}  ],\n`
  return (
    '/** Made from the .sql files by scripts/generate-sql.mjs; not meant to be edited. */\n' +
    `export const ${owner}Sql = {\n  name: '${owner}',\n${list('tables', read('tables'))}${list('functions', read('functions'))}}\n`
  )
}

/** From CREATE to the dollar quote that ends the body. */
function functionsOf(lines) {
  const functions = []
  for (let i = 0; i < lines.length; i++) {
    const name = /^CREATE (?:OR REPLACE )?FUNCTION (\w+)/.exec(lines[i])?.[1]
    if (name === undefined) continue
    const quotes = (end) =>
      lines
        .slice(i, end + 1)
        .join('\n')
        .split('$$').length - 1
    let end = i
    while (end < lines.length && quotes(end) < 2) end++
    functions.push({ name, line: i + 1, length: end - i + 1 })
    i = end
  }
  return functions
}

function faultsOf(folder) {
  return ['tables', 'functions'].flatMap((kind) =>
    sqlFiles(path.join(folder, kind)).flatMap((file) => {
      const at = path.relative(root, path.join(folder, kind, file))
      const lines = readFileSync(path.join(folder, kind, file), 'utf8').split('\n')
      return [
        ...(lines[0].startsWith('-- ') ? [] : [`${at}:1 needs a head comment that says what it decides`]),
        ...lines.flatMap((line, i) =>
          [...line].length > columnsMax ? [`${at}:${i + 1} has more than ${columnsMax} columns`] : [],
        ),
        ...functionsOf(lines).flatMap(({ name, line, length }) =>
          length > functionLinesMax && !longFunctions.includes(name)
            ? [`${at}:${line} ${name} has ${length} lines, more than ${functionLinesMax}`]
            : [],
        ),
      ]
    }),
  )
}

/** Writes the modules that changed; returns those that were stale. */
export function generateSql({ write = true } = {}) {
  const stale = []
  for (const folder of sqlFolders()) {
    const file = path.join(path.dirname(folder), 'generated', 'sql.ts')
    const text = moduleOf(folder)
    if (existsSync(file) && readFileSync(file, 'utf8') === text) continue
    stale.push(path.relative(root, file))
    if (!write) continue
    mkdirSync(path.dirname(file), { recursive: true })
    writeFileSync(file, text)
  }
  return stale
}

if (process.argv[1] !== undefined && import.meta.url === pathToFileURL(process.argv[1]).href) {
  if (process.argv.includes('--check')) {
    const faults = [
      ...sqlFolders().flatMap(faultsOf),
      ...generateSql({ write: false }).map((file) => `${file} is stale: run node scripts/generate-sql.mjs`),
    ]
    for (const fault of faults) console.error(fault)
    process.exitCode = faults.length === 0 ? 0 : 1
  } else {
    generateSql()
  }
}
