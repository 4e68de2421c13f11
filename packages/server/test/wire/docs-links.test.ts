/** Everything that the documents name exists: files, headings, commands, settings, scripts. */
import { execFileSync } from 'node:child_process'
import { existsSync, readdirSync, readFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { describe, expect, it } from 'vitest'
import { describeConfig, loadConfig } from '../../src/config/index.js'
import { clientSettings } from '../../src/config/settings.js'
import { program } from '../server-process.js'

const root = fileURLToPath(new URL('../../../../', import.meta.url))
const below = (folder: string): string[] =>
  readdirSync(join(root, folder), { recursive: true, encoding: 'utf8' }).map((name) => `${folder}/${name}`)
const readmes = (folder: string): string[] =>
  readdirSync(join(root, folder)).map((name) => `${folder}/${name}/README.md`)
const documents = [
  ...readdirSync(root),
  ...below('docs'),
  ...readmes('packages'),
  ...readmes('examples'),
  'examples/README.md',
]
  .filter((file) => file.endsWith('.md') && existsSync(join(root, file)))
  .map((file) => ({ file, text: readFileSync(join(root, file), 'utf8') }))

const scripts = Object.keys(JSON.parse(readFileSync(join(root, 'package.json'), 'utf8')).scripts)
const settings = new Set([
  ...describeConfig(loadConfig({})).map(({ name }) => name),
  ...Object.values(clientSettings.client).map(({ name }) => name),
  // For the tests themselves.
  'SPILLWAY_TEST_DATABASE_URL',
  'SPILLWAY_TEST_POOLER',
])

/** The anchors of a page, as GitHub makes them from its headings. */
const anchorsOf = (text: string): string[] =>
  [...text.matchAll(/^#+ (.+)$/gm)].map(([, heading = '']) =>
    heading
      .toLowerCase()
      .replaceAll(/[^\p{L}\p{N}_ -]/gu, '')
      .replaceAll(' ', '-'),
  )

const unique = (matches: Iterable<RegExpMatchArray>): string[] => [...new Set([...matches].map((m) => m[1] ?? ''))]

it('there are documents', () => {
  expect(documents.map(({ file }) => file)).toEqual(
    expect.arrayContaining(['README.md', 'ARCHITECTURE.md', 'docs/concepts/guarantees.md', 'docs/guides/library.md']),
  )
})

describe.each(documents)('$file', ({ file, text }) => {
  it('links to files that exist', () => {
    const links = unique(text.matchAll(/\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)/g))
    expect(links.filter((link) => !existsSync(join(root, dirname(file), link)))).toEqual([])
  })

  it('links to headings that exist', () => {
    const links = unique(text.matchAll(/\]\((?!https?:|mailto:)([^)\s]*#[^)\s]+)\)/g))
    const missing = links.filter((link) => {
      const [path = '', anchor = ''] = link.split('#')
      const target = path === '' ? text : readFileSync(join(root, dirname(file), path), 'utf8')
      return !anchorsOf(target).includes(anchor)
    })
    expect(missing).toEqual([])
  })

  it('names source and test files that exist', () => {
    const named = unique(text.matchAll(/`((?:packages|scripts|examples|docs|src|test)\/[\w./-]+\.\w+)`/g))
    const missing = named.filter(
      (name) =>
        ![root, join(root, 'packages/spillway'), join(root, 'packages/server')].some((at) =>
          existsSync(join(at, name)),
        ),
    )
    expect(missing).toEqual([])
  })

  it('names settings that exist', () => {
    const named = unique(text.matchAll(/\b(SPILLWAY_[A-Z_]*[A-Z])\b/g))
    expect(named.filter((name) => !settings.has(name))).toEqual([])
  })

  it('names npm scripts that exist', () => {
    const named = unique(text.matchAll(/\bnpm run ([\w-]+)/g))
    expect(named.filter((name) => !scripts.includes(name))).toEqual([])
  })

  it('names commands that exist', () => {
    const named = unique(
      text.matchAll(/(?<!npm i )\bspillway ((?:ops |dead-letters )?[a-z][a-z-]*)(?= *(?:`|$|--|#|<|\s\d))/gm),
    )
    for (const words of named) {
      execFileSync(process.execPath, [program, ...words.split(' '), '--help'], { stdio: 'pipe' })
    }
  })
})
