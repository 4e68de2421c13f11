/** Rules about files (scripts/file-rules.mjs), and that every package with sources takes part in the build. */
import { readFileSync } from 'node:fs'
import path from 'node:path'
import { root } from './build.mjs'
import { fileFaults } from './file-rules.mjs'
import { sourceFiles } from './source-files.mjs'

const files = sourceFiles()
const faults = []
for (const file of files) {
  const content = readFileSync(path.join(root, file))
  if (content.includes(0)) continue // binary
  faults.push(...fileFaults(file, content.toString('utf8')))
}

const { references } = JSON.parse(readFileSync(path.join(root, 'tsconfig.json'), 'utf8'))
const built = new Set(references.map((reference) => reference.path))
const withSources = new Set(files.map((file) => /^(packages\/[^/]+)\/src\/.*\.ts$/.exec(file)?.[1]).filter(Boolean))
for (const dir of withSources) {
  if (files.includes(`${dir}/tsconfig.json`) && !built.has(dir)) {
    faults.push({ file: 'tsconfig.json', line: 1, message: `${dir} has sources but is not among the references` })
  }
}

for (const { file, line, message } of faults) console.error(`${file}:${line} ${message}`)
process.exitCode = faults.length > 0 ? 1 : 0
