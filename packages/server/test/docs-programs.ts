/**
 * The programs and the code of the library's pages. A block whose first line is `// name` is a whole file; an `sh` block that
 * ends with `node name` starts it; a `curl` below is a call to it, and the `http` block below that is the answer: its status,
 * the headers that it names, and the members of its body that it names ("…" stands for any text).
 *
 * Every other block is a fragment. It has the names of docs-context.ts, and a comment `// → value` behind an expression says
 * what the expression is.
 */
import { execFile, spawn } from 'node:child_process'
import { mkdir, mkdtemp, rm, symlink, writeFile } from 'node:fs/promises'
import { connect } from 'node:net'
import { tmpdir } from 'node:os'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { expect } from 'vitest'
import { type Block, matching } from './docs-page.js'
import { until } from './server-process.js'

const root = fileURLToPath(new URL('../../../', import.meta.url))
const codeLanguages = new Set(['js', 'ts'])
const fileName = /^\/\/ ([\w./[\]-]+\.(?:js|mjs|ts))\n/

export const fileOf = ({ language, text }: Block): string | undefined =>
  codeLanguages.has(language) ? fileName.exec(text)?.[1] : undefined
export const isFragment = (block: Block): boolean => codeLanguages.has(block.language) && fileOf(block) === undefined

/** A folder from which our packages and their dependencies can be imported. */
export async function makeFolder(): Promise<{ path: string; remove(): Promise<void> }> {
  const path = await mkdtemp(join(tmpdir(), 'spillway-docs-'))
  await symlink(join(root, 'node_modules'), join(path, 'node_modules'))
  await writeFile(join(path, 'package.json'), '{"type":"module"}')
  return { path, remove: () => rm(path, { recursive: true, force: true }) }
}

export async function writeIn(folder: string, name: string, text: string): Promise<string> {
  const path = join(folder, name)
  await mkdir(dirname(path), { recursive: true })
  await writeFile(path, text)
  return path
}

/** The address that the pages use. */
const shown = { port: '3000', origin: 'http://127.0.0.1:3000' }

export interface Program {
  written(): string
  /** SIGTERM, and how it ends: all programs of the pages end by themselves then. */
  stop(): Promise<number | null>
}

/** The machine may be slow: an answer must not depend on that. */
const neverBusy = 'busyQueueAbove: 1, acceptWaitBudgetMs: 60_000, storeTimeoutMs: 20_000, directWaitMs: 60_000, '

/** Writes the files that a page shows. They listen on this port instead. */
export async function writeFiles(folder: string, blocks: readonly Block[], port: number): Promise<void> {
  for (const block of blocks) {
    const file = fileOf(block)
    if (file === undefined) continue
    const text = block.text.replaceAll(shown.port, String(port)).replaceAll(/createIntake\(\{\s/g, `$&${neverBusy}`)
    await writeIn(folder, file, text)
  }
}

/** Starts a program and waits until it listens. */
export async function startProgram(
  folder: string,
  { command, port, env }: { command: readonly [string, ...string[]]; port: number; env: Record<string, string> },
): Promise<Program> {
  const { PATH = '', HOME = '/' } = process.env
  const [name, ...args] = command
  const child = spawn(name, args, {
    cwd: folder,
    env: { PATH, HOME, ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
  })
  let written = ''
  for (const stream of [child.stdout, child.stderr]) {
    stream.setEncoding('utf8').on('data', (text: string) => {
      written += text
    })
  }
  let isEnded = false
  const ended = new Promise<number | null>((resolve, reject) => {
    child.once('error', reject)
    child.once('close', (status) => {
      isEnded = true
      resolve(status)
    })
  })
  await until(
    `${name} listens`,
    () => {
      if (isEnded) throw new Error(`${name} ended: ${written}`)
      return isListening(port)
    },
    90_000,
  )
  return {
    written: () => written,
    stop: () => {
      child.kill('SIGTERM')
      return ended
    },
  }
}

const isListening = (port: number): Promise<boolean> =>
  new Promise((resolve) => {
    const socket = connect(port, '127.0.0.1')
    socket.once('connect', () => resolve(true))
    socket.once('error', () => resolve(false))
    socket.once('connect', () => socket.destroy())
  })

export interface Reply {
  status: number
  headers: Record<string, string>
  body: unknown
}

/** Runs a block with one `curl -i`. */
export async function callOf(
  text: string,
  { port, variables }: { port: number; variables: Record<string, string> },
): Promise<Reply> {
  const script = text.replaceAll(shown.origin, `http://127.0.0.1:${port}`).replaceAll(/^curl -i/gm, 'curl -s -S -i')
  const env = { PATH: process.env.PATH ?? '', ...variables }
  const { stdout } = await promisify(execFile)('bash', ['-euc', script], { env })
  return replyOf(stdout)
}

/** An answer as it is on the wire, or as a page shows it. */
export function replyOf(text: string): Reply {
  const [head = '', ...rest] = text.replaceAll('\r\n', '\n').split('\n\n')
  const [start = '', ...lines] = head.split('\n')
  const body = rest.join('\n\n').trim()
  const pairs = lines.filter((line) => line !== '').map((line) => line.split(/:\s*(.*)/, 2))
  return {
    status: Number(/^HTTP\/[\d.]+ (\d{3})/.exec(start)?.[1]),
    headers: Object.fromEntries(pairs.map(([name = '', value = '']) => [name.toLowerCase(), value])),
    body: /^[[{]/.test(body) ? (JSON.parse(body) as unknown) : body,
  }
}

/** "…" within a header stands for any text, too. */
export function expectReply(actual: Reply, wanted: Reply): void {
  const context = JSON.stringify(actual)
  expect(actual.status, context).toBe(wanted.status)
  for (const [name, value] of Object.entries(wanted.headers)) {
    const form = value.split('…').map((part) => part.replaceAll(/[.*+?^${}()|[\]\\]/g, '\\$&'))
    expect(actual.headers[name] ?? '', `${name} in ${context}`).toMatch(new RegExp(`^${form.join('.+')}$`))
  }
  if (wanted.body !== '') expect(actual.body, context).toEqual(matching(wanted.body))
}
