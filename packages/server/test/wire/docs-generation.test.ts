/** What docs/guides/generation.md shows is run as it stands there. */
import { execFile } from 'node:child_process'
import { promisify } from 'node:util'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { atOrigin, blocksOf } from '../docs-page.js'
import { endAll, type ServerProcess, startServer } from '../server-process.js'

const blocks = await blocksOf('generation.md')
const textOf = (language: string): string[] =>
  blocks.filter((block) => block.language === language).map(({ text }) => text)

let database: TestDatabase
let server: ServerProcess

beforeAll(async () => {
  database = await freshDatabase()
  server = await startServer({ DATABASE_URL: database.url, GENERATION_DEMO_TOKENS_PER_SECOND: '1000' })
})

afterAll(async () => {
  await endAll()
  await database.drop()
})

const run = async (script: string): Promise<string> =>
  (await promisify(execFile)('bash', ['-euc', atOrigin(script, server.origin)], { timeout: 30_000 })).stdout

describe('docs/guides/generation.md', () => {
  it("streams in OpenAI's form", async () => {
    const output = await run(`${textOf('sh')[0]?.trimEnd()} -s`)
    expect(output).toContain('"object":"chat.completion.chunk"')
    expect(output.trimEnd().endsWith('data: [DONE]')).toBe(true)
  })

  it('streams in the native form, with the events that it shows', async () => {
    const output = await run(`${textOf('sh')[1]?.trimEnd()} -s`)
    const shown = textOf('text').find((text) => text.startsWith('event: status'))
    const events = (text: string): string[] => [...new Set(text.match(/^event: \w+$/gm))]
    expect(events(output)).toEqual(events(shown ?? ''))
    const complete = /^event: complete\ndata: (.*)$/m
    const members = (text: string): string[] => Object.keys(JSON.parse(complete.exec(text)?.[1] ?? '{}') as object)
    expect(members(output)).toEqual(members(shown ?? ''))
  })

  it('resumes and cancels with the lines that it shows', async () => {
    const start = `${textOf('sh')[1]?.trimEnd()} -s -D - -o /dev/null`
    const id = /^x-stream-id: (\S+)/im.exec(await run(start))?.[1] ?? ''
    const [resume = '', cancel = ''] =
      textOf('text')
        .find((text) => text.startsWith('curl -N'))
        ?.split('\n') ?? []
    expect(await run(`${resume.replace('<X-Stream-Id>', id)} -s`)).toMatch(/^id: 13\n/)
    expect(await run(`${cancel.replace('<X-Stream-Id>', id)} -s`)).toContain('operation_finished')
  })

  it("works with OpenAI's own client, as it shows", async () => {
    const [script = ''] = textOf('js')
    const { stdout } = await promisify(execFile)(
      process.execPath,
      ['--input-type=module', '-e', atOrigin(script, server.origin)],
      { timeout: 30_000 },
    )
    expect(stdout).toContain('spillway')
  })
})
