/**
 * What a page shows is run as it stands there, in its order: every `sh` block against a real server. Where an answer stands
 * below a block, it is compared with those that came ("…" stands for any text; members that are left out are not looked at).
 */
import { execFile } from 'node:child_process'
import { readFile } from 'node:fs/promises'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { expect } from 'vitest'

export interface Block {
  language: string
  text: string
  /** The heading above it. */
  heading: string
  /** Of its first line of text, in the page. */
  line: number
}

export interface Command {
  text: string
  answer: unknown
}

/** `page`: below docs/guides. */
export async function blocksOf(page: string): Promise<Block[]> {
  const text = await readFile(fileURLToPath(new URL(`../../../docs/guides/${page}`, import.meta.url)), 'utf8')
  const headings = [...text.matchAll(/^#+ (.+)$/gm)]
  return [...text.matchAll(/^```(\w+)\n([\s\S]*?)^```$/gm)].map(({ index, 1: language = '', 2: inside = '' }) => ({
    language,
    text: inside,
    heading: headings.findLast((heading) => heading.index < index)?.[1] ?? '',
    line: text.slice(0, index).split('\n').length + 1,
  }))
}

/** `elsewhere`: blocks that are run by other means. */
export function commandsOf(blocks: readonly Block[], elsewhere = /^\b$/): Command[] {
  return blocks.flatMap(({ language, text }, i) => {
    if (language !== 'sh' || elsewhere.test(text)) return []
    const next = blocks[i + 1]
    return [{ text, answer: next?.language === 'json' ? (JSON.parse(next.text) as unknown) : undefined }]
  })
}

export const atOrigin = (text: string, origin: string): string => text.replaceAll('http://127.0.0.1:7745', origin)

/** The answers of a block, one for each call in it. */
export async function runBlock(
  text: string,
  { origin, folder, variables = {} }: { origin: string; folder: string; variables?: Record<string, string> },
): Promise<unknown[]> {
  const script = atOrigin(text, origin)
    .replace(/^[A-Z]+=….*$/gm, '')
    .replaceAll(/^curl /gm, "curl --fail-with-body -w '\\n' ")
  const env = { PATH: process.env.PATH ?? '', ...variables }
  const { stdout } = await promisify(execFile)('bash', ['-euc', script], { cwd: folder, env })
  return stdout
    .split('\n')
    .filter((line) => line !== '')
    .map((line) => JSON.parse(line) as unknown)
}

export function matching(expected: unknown): unknown {
  if (expected === '…') return expect.any(String)
  if (Array.isArray(expected)) return expected.map(matching)
  if (typeof expected !== 'object' || expected === null) return expected
  return expect.objectContaining(
    Object.fromEntries(Object.entries(expected).map(([name, value]) => [name, matching(value)])),
  )
}
