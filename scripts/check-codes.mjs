/** docs/reference/errors.md lists exactly the problem codes that the protocol package declares. */
import { readFileSync } from 'node:fs'
import path from 'node:path'
import { root } from './build.mjs'
import { codeFaults, declaredCodes, documentedCodes } from './problem-codes.mjs'

const read = (file) => readFileSync(path.join(root, file), 'utf8')
const faults = codeFaults(
  declaredCodes(read('packages/protocol/src/wire/codes.ts')),
  documentedCodes(read('docs/reference/errors.md')),
)
for (const fault of faults) console.error(`docs/reference/errors.md: ${fault}`)
process.exitCode = faults.length > 0 ? 1 : 0
