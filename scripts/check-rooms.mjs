/** Fails on an import that the rooms (scripts/rooms.mjs) do not allow. */
import { readFileSync } from 'node:fs'
import path from 'node:path'
import { root } from './build.mjs'
import { violations } from './rooms.mjs'
import { sourceFiles } from './source-files.mjs'

const files = sourceFiles().filter((file) => /^packages\/[^/]+\/(src|test)\/.*\.[mc]?tsx?$/.test(file))
const faults = files.flatMap((file) => violations(file, readFileSync(path.join(root, file), 'utf8')))
for (const { file, line, message } of faults) console.error(`${file}:${line} ${message}`)
if (files.length === 0) console.error('no source files found')
process.exitCode = faults.length > 0 || files.length === 0 ? 1 : 0
