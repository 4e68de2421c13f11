/** The tables of docs/reference/library.md have the options that the calls accept, with their defaults, and the calls that there are. */
import { readFile } from 'node:fs/promises'
import { fileURLToPath } from 'node:url'
import { capacity, connections, createIntake, halt, postgres, pressure, rate } from 'spillway'
import { createTestIntake } from 'spillway/testing'
import { afterAll, beforeAll, expect, it } from 'vitest'
import { intakeDefaults } from '../../../spillway/src/core/settings.js'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { type DocsContext, docsContext } from '../docs-context.js'

const page = await readFile(fileURLToPath(new URL('../../../../docs/reference/library.md', import.meta.url)), 'utf8')

/** The rows of the first table below a heading, as cells. */
function tableOf(heading: string): string[][] {
  const section = page.split(/^#+ /m).find((text) => text.startsWith(`${heading}\n`)) ?? ''
  const table = /^\|.*\n\|[-|]+\n((?:\|.*\n)+)/m.exec(section)?.[1] ?? ''
  return table
    .trim()
    .split('\n')
    .map((row) =>
      row
        .split(/(?<!\\)\|/)
        .map((cell) => cell.trim())
        .slice(1, -1),
    )
}

const namesIn = (cell = ''): string[] => [...cell.matchAll(/`([\w.]+)[^`]*`/g)].map(([, name = '']) => name)
const optionsOf = (heading: string): string[] => tableOf(heading).flatMap(([first]) => namesIn(first))

let database: TestDatabase
let context: DocsContext
beforeAll(async () => {
  database = await freshDatabase()
  context = await docsContext(database.url)
})
afterAll(async () => {
  await context.close()
  await database.drop()
})

const wrong = { nonsenseOption: 1 } as never
/** Each throws an OptionError that lists the options. */
const calls: Record<string, () => unknown> = {
  createIntake: () => createIntake(wrong),
  postgres: () => postgres(wrong),
  define: () => context.intake.define('nonsense', wrong),
  Submissions: () => context.intake.submit(context.placeOrder, context.order, wrong),
  pressure: () => pressure(wrong),
  connections: () => connections(wrong),
  capacity: () => capacity(wrong),
  halt: () => halt(wrong),
  rate: () => rate(wrong),
}

/** For submitAll alone. */
const notShown = ['texts']

it.each(Object.entries(calls))('%s', async (heading, call) => {
  const fault = await Promise.resolve()
    .then(call)
    .catch((thrown: Error) => thrown)
  const accepted = /the options are (.*)$/.exec((fault as Error).message)?.[1]?.split(', ') ?? []
  expect(accepted.length).toBeGreaterThan(0)
  expect(optionsOf(heading).sort()).toEqual(accepted.filter((name) => !notShown.includes(name)).sort())
})

it('createTestIntake takes its own options and those of createIntake', async () => {
  const fault: unknown = await createTestIntake(wrong).catch((thrown: unknown) => thrown)
  const accepted = /the options are (.*)$/.exec((fault as Error).message)?.[1]?.split(', ') ?? []
  const shown = [...optionsOf('Tests of yours'), ...optionsOf('createIntake')]
  expect(accepted.sort()).toEqual(shown.filter((name) => name !== 'store').sort())
})

it('the defaults of createIntake', () => {
  const shown = new Map(tableOf('createIntake').map(([name, value]) => [namesIn(name)[0], namesIn(value)[0]]))
  for (const [name, value] of Object.entries(intakeDefaults))
    expect([name, shown.get(name)]).toEqual([name, String(value)])
})

it('all calls', async () => {
  const source = await readFile(fileURLToPath(new URL('../../../spillway/src/index.ts', import.meta.url)), 'utf8')
  const members = /export type Intake = Pick<\s+WholeIntake,([^>]*)>/.exec(source)?.[1] ?? ''
  const existing = [...members.matchAll(/'(\w+)'/g)].map(([, name]) => name)
  const cells = tableOf('All calls').map(([first]) => first ?? '')
  const shown = cells.flatMap((cell) => [...cell.matchAll(/`([a-z]\w*)/gi)].map(([, name]) => name))
  expect(existing.length).toBeGreaterThan(20)
  expect([...new Set(shown)].sort()).toEqual(existing.sort())
})
