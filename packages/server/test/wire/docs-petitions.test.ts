/** What docs/guides/petitions.md shows is run in its order: every `sh` block, and the two scripts. */
import { execFile } from 'node:child_process'
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { endAll, get, type ServerProcess, startServer } from '../server-process.js'

const page = await readFile(fileURLToPath(new URL('../../../../docs/guides/petitions.md', import.meta.url)), 'utf8')
const blocks = [...page.matchAll(/^```(\w+)\n([\s\S]*?)^```$/gm)].map(([, language = '', text = '']) => ({
  language,
  text,
}))
const shell = blocks.filter(({ language }) => language === 'sh').map(({ text }) => text)

let database: TestDatabase
let server: ServerProcess
let folder: string

beforeAll(async () => {
  database = await freshDatabase()
  server = await startServer({ DATABASE_URL: database.url })
  folder = await mkdtemp(join(tmpdir(), 'spillway-docs-'))
})

afterAll(async () => {
  await endAll()
  await database.drop()
  await rm(folder, { recursive: true })
})

const here = (text: string): string => text.replaceAll('http://127.0.0.1:7745', server.origin)

function run(text: string, id = ''): Promise<{ stdout: string }> {
  return promisify(execFile)('bash', ['-ec', here(text).replace(/^ID=….*$/m, `ID=${id}`)], { cwd: folder })
}

/** Answers of curl stand one behind the other. */
const answersOf = ({ stdout }: { stdout: string }): Record<string, unknown>[] =>
  stdout
    .replaceAll('}{', '}\n{')
    .split('\n')
    .filter((line) => line !== '')
    .map((line) => JSON.parse(line) as Record<string, unknown>)

describe('docs/guides/petitions.md', () => {
  it('shows commands that are answered as it says', async () => {
    const [submit = '', read = '', list = '', move = '', halt = '', ledger = ''] = shell
    const receipt = JSON.parse(blocks.find(({ language }) => language === 'json')?.text ?? '') as Record<string, string>
    const [received] = answersOf(await run(submit))
    expect(received).toMatchObject({ content_hash: receipt.content_hash, state: 'RECEIVED', realm: receipt.realm })
    const id = String(received?.petition_id)

    // Waits for the change that the block behind the next one makes.
    const waiting = run(read, id)
    expect(answersOf(await run(list))).toMatchObject([{ items: [{ petition_id: id }], next_cursor: null, total: 1 }])
    expect(answersOf(await run(`ID=${id}\n${move}`))).toMatchObject([{ state: 'DELIBERATING' }, { status: 409 }])
    expect(answersOf(await waiting)).toMatchObject([{ petition_id: id }, { petition_id: id, version: 2 }])

    expect(answersOf(await run(halt))).toMatchObject([{ halted: true, reason: 'flood' }, { halted: false }])
    expect(answersOf(await run(ledger))).toMatchObject([
      {
        items: [
          { type: 'petition.submission.received' },
          { type: 'petition.submission.deliberating' },
          { type: 'system.halted' },
          { type: 'system.resumed' },
        ],
      },
      { ok: true, from: 1, to: 4 },
    ])
  })

  it('has scripts that verify an export and find changed rows', async () => {
    for (const { language, text } of blocks) {
      const name = /^\/\/ ([\w-]+\.mjs)$/m.exec(text)?.[1]
      if (language === 'js' && name !== undefined) await writeFile(join(folder, name), here(text))
    }
    const verify = shell.find((text) => text.includes('verify-ledger.mjs')) ?? ''
    const { body } = await get(server, '/api/v1/ledger/verify')
    expect((await run(verify)).stdout).toBe(`${body.to} rows, head ${body.head_hash}\n`)
    const rows = (await readFile(join(folder, 'ledger.jsonl'), 'utf8')).replace('flood', 'blood')
    await writeFile(join(folder, 'changed.jsonl'), rows)
    await expect(run('node verify-ledger.mjs < changed.jsonl')).rejects.toMatchObject({
      stderr: expect.stringContaining('broken at 3'),
    })
  })

  it('shows no command that is not run here', () => {
    expect(shell.slice(0, 6)).toHaveLength(6)
    for (const text of shell.slice(6)) expect(text).toMatch(/ledger\.mjs|^npm run bench/)
  })
})
