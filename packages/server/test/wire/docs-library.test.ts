/** What the pages of the library show is run: their programs with the calls to them, and every fragment. */
import { randomBytes } from 'node:crypto'
import { freePort } from '@spillway/embedded-postgres/internal'
import { postgres } from 'spillway'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { closeOpened, type DocsContext, docsContext, type FragmentNames, openIntake } from '../docs-context.js'
import { compileAll, folderOf, writeFragment } from '../docs-fragments.js'
import { type Block, blocksOf, matching } from '../docs-page.js'
import {
  callOf,
  expectReply,
  fileOf,
  isFragment,
  makeFolder,
  type Program,
  replyOf,
  startProgram,
  writeFiles,
} from '../docs-programs.js'
import { until } from '../server-process.js'

const pages = [
  'library',
  '../reference/library',
  '../../packages/spillway/README',
  'frameworks/fastify',
  'frameworks/express',
  'frameworks/node-http',
  'frameworks/fetch',
].map((name) => `${name}.md`)

const found = Object.fromEntries(await Promise.all(pages.map(async (page) => [page, await blocksOf(page)] as const)))

/** The `sh` blocks of a page, each with the answer below it. */
const stepsOf = (blocks: readonly Block[]) =>
  blocks.flatMap((block, i) => {
    if (block.language !== 'sh') return []
    const next = blocks[i + 1]
    return [{ text: block.text, line: block.line, answer: next?.language === 'http' ? next.text : undefined }]
  })

/** Compiling and starting take a while on a busy machine. */
const patient = { timeout: 120_000 }
const untilSeen: FragmentNames['until'] = (look) => until('a value', look, 30_000)

let folder: Awaited<ReturnType<typeof makeFolder>>
beforeAll(async () => {
  folder = await makeFolder()
})
afterAll(() => folder.remove())

it('the code of all pages compiles', patient, async () => {
  expect(await compileAll(folder.path, found)).toBe('')
})

/** Route handlers, and a program for other runtimes: docs-frameworks.test.ts runs them. */
const runElsewhere = ['intake.js', 'app/orders/route.js', 'app/api/v1/[...path]/route.js', 'deno-or-bun.mjs']

it.each(Object.entries(found))('docs/guides/%s shows nothing that is not run', (_, blocks) => {
  const started = stepsOf(blocks).flatMap(({ text }) => /^node (\S+)$/m.exec(text)?.[1] ?? [])
  const files = blocks.flatMap((block) => fileOf(block) ?? [])
  expect(files.filter((file) => !started.includes(file) && !runElsewhere.includes(file))).toEqual([])
  expect(blocks.filter(({ language }) => !['sh', 'http', 'js', 'ts', 'sql'].includes(language))).toEqual([])
  // What is neither started nor called: installing the packages.
  expect(stepsOf(blocks).filter(({ text }) => !/^(npm i |curl -i )|^node /m.test(text))).toEqual([])
})

describe.each(Object.entries(found).filter(([, blocks]) => stepsOf(blocks).length > 0))(
  'the programs of docs/guides/%s',
  (_, blocks) => {
    let database: TestDatabase
    let port: number
    let program: Program | undefined
    const variables: Record<string, string> = {}

    beforeAll(async () => {
      database = await freshDatabase()
      port = await freePort()
    })
    afterAll(async () => {
      expect(await program?.stop(), program?.written()).toBe(0)
      await database.drop()
    })

    it.each(stepsOf(blocks))('line $line: $text', patient, async ({ text, answer }) => {
      if (/^npm i /.test(text)) return
      const name = /^node (\S+)$/m.exec(text)?.[1]
      if (name !== undefined) {
        await writeFiles(folder.path, blocks, port)
        const env = { DATABASE_URL: database.url }
        program = await startProgram(folder.path, { command: [process.execPath, name], port, env })
        return
      }
      const reply = await callOf(text, { port, variables })
      if (answer !== undefined) expectReply(reply, replyOf(answer))
      const { operationId } = reply.body as { operationId?: string }
      if (operationId !== undefined) variables.ID = operationId
    })
  },
)

describe.each(Object.entries(found).filter(([, blocks]) => blocks.some(isFragment)))(
  'the fragments of docs/guides/%s',
  (page, blocks) => {
    let database: TestDatabase
    let context: DocsContext

    beforeAll(async () => {
      database = await freshDatabase()
      process.env.DATABASE_URL = database.url
      context = await docsContext(database.url)
    })
    afterAll(async () => {
      delete process.env.DATABASE_URL
      await context.close()
      await database.drop()
    })

    const run = blocks.filter((block) => isFragment(block) || block.language === 'sql')
    it.each(run)('line $line: $heading', patient, async (block) => {
      if (block.text.includes('CREATE ROLE app')) return runsAs(context, database.url, block.text)
      if (block.language === 'sql') return void (await context.pool.query(block.text))
      const file = await writeFragment(folder.path, `${folderOf(page)}-${block.line}`, block)
      const { default: run } = await import(file)
      try {
        await run({ ...context, until: untilSeen }, (actual: unknown, wanted: unknown, line: string) => {
          expect(actual, line).toEqual(matching(wanted))
        })
      } finally {
        await closeOpened()
      }
    })
  },
)

/** An intake makes its tables and runs with no more rights than those of the page's role. Roles belong to the whole server, so it is removed. */
async function runsAs({ pool }: DocsContext, url: string, statements: string): Promise<void> {
  const role = `docs_${randomBytes(6).toString('hex')}`
  await pool.query(statements.replaceAll(/\bapp\b/g, role))
  try {
    const its = new URL(url)
    its.searchParams.set('options', `-c role=${role}`)
    const intake = await openIntake({ store: postgres({ url: its.href, schema: 'intake' }) })
    const whoAmI = intake.define('who', {
      run: async (_, { tx }) => (await tx.query<{ current_user: string }>('SELECT current_user', [])).rows[0],
    })
    expect(await intake.submit(whoAmI, {})).toMatchObject({ kind: 'done', result: { current_user: role } })
  } finally {
    await closeOpened()
    await pool.query(`DROP OWNED BY ${role}; DROP ROLE ${role}`)
  }
}
