/** The library exports few names: a user who looks for something reads the list. Raise a limit only for what users must name. */
import { readFileSync } from 'node:fs'
import path from 'node:path'
import { root } from './build.mjs'

/** With types, and those that exist at run time. */
const limits = { names: 55, runtime: 30 }

const text = readFileSync(path.join(root, 'packages/spillway/src/index.ts'), 'utf8')
const lists = [...text.matchAll(/^export (?:type )?\{([^}]*)\}/gm)].flatMap(([, list]) => list.split(','))
const own = [...text.matchAll(/^export (?:async function|function|class|const|type|interface) (\w+)/gm)]
const counts = {
  names: lists.filter((name) => name.trim() !== '').length + own.length,
  runtime: Object.keys(await import('../packages/spillway/dist/index.js')).length,
}
for (const [kind, most] of Object.entries(limits)) {
  console.log(`${counts[kind]} ${kind}, at most ${most}`)
  if (counts[kind] > most) process.exitCode = 1
}
