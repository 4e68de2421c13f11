import { describe, expect, it } from 'vitest'
import { importsOf, violations } from './rooms.mjs'

const src = 'packages/spillway/src'
const messages = (file, source) => violations(file, source).map(({ message }) => message)

describe('reading imports', () => {
  it('finds every form, with its line', () => {
    const source = [
      "import a from './a.js'",
      "import type { B } from './b.js'",
      'import {',
      '  c,',
      "} from './c.js'",
      "import './d.js'",
      "export * from './e.js'",
      "export type { F } from './f.js'",
      "const g = await import('./g.js')",
      "import h, { type I } from './h.js'",
      "import * as j from './j.js'",
      "const k = require.resolve('./k.js')",
    ].join('\n')
    expect(importsOf(source)).toEqual([
      { specifier: './a.js', typeOnly: false, line: 1 },
      { specifier: './b.js', typeOnly: true, line: 2 },
      { specifier: './c.js', typeOnly: false, line: 5 },
      { specifier: './d.js', typeOnly: false, line: 6 },
      { specifier: './e.js', typeOnly: false, line: 7 },
      { specifier: './f.js', typeOnly: true, line: 8 },
      { specifier: './g.js', typeOnly: false, line: 9 },
      { specifier: './h.js', typeOnly: false, line: 10 },
      { specifier: './j.js', typeOnly: false, line: 11 },
      { specifier: './k.js', typeOnly: false, line: 12 },
    ])
  })

  it('is not fooled by comments, strings, templates and expressions', () => {
    const source = [
      "// import x from 'pg'",
      "/* import x from 'pg' */",
      "const text = `\nimport x from 'pg'\n`",
      'const quote = /[\'"`]/',
      "export const from = 'pg'",
      "export type Name = 'pg'",
      "const url = 'http://x' // import('pg')",
    ].join('\n')
    expect(importsOf(source)).toEqual([])
  })

  it('does not take a type declaration before an import for a type-only import', () => {
    const source = "export type A = number\nimport { b } from './b.js'"
    expect(importsOf(source)).toEqual([{ specifier: './b.js', typeOnly: false, line: 2 }])
  })

  it('tells a default import named type from a type-only one', () => {
    expect(importsOf("import type from './a.js'")[0]?.typeOnly).toBe(false)
  })
})

describe('rooms: wrong imports', () => {
  for (const room of ['pipeline', 'operations', 'streams', 'ledger', 'pressure']) {
    for (const target of ['http', 'workloads', 'brokers', 'cli']) {
      it(`${room} may not import ${target}`, () => {
        expect(messages(`${src}/${room}/x.ts`, `import { y } from '../${target}/y.js'`)).toEqual([
          `${room} may not import from ${target}`,
        ])
      })
    }
    for (const driver of ['pg', 'fastify', 'undici', 'ioredis', '@nats-io/jetstream', '@fastify/swagger', 'pg-pool']) {
      it(`${room} may not import ${driver}, not even its types`, () => {
        expect(messages(`${src}/${room}/x.ts`, `import type { y } from '${driver}'`)).toEqual([
          `${room} may not import the driver ${driver}`,
        ])
      })
    }
  }

  it.each([
    ['telemetry/x.ts', "import pg from 'pg'"],
    ['http/x.ts', "import type { Pool } from 'pg'"],
    ['store/x.ts', "import fastify from 'fastify'"],
    ['workloads/petitions/x.ts', "import type { FastifyRequest } from 'fastify'"],
    ['workloads/petitions/x.ts', "import pg from 'pg'"],
    ['workloads/petitions/x.ts', "import { x } from '../../pipeline/x.js'"],
    ['workloads/petitions/x.ts', "import { x } from '../../store/postgres/x.js'"],
    ['workloads/petitions/x.ts', "import { x } from '../messages/x.js'"],
    ['http/x.ts', "import Redis from 'ioredis'"],
    ['http/x.ts', "import { x } from '../cli/x.js'"],
    ['gates/x.ts', "import { x } from '../pipeline/x.js'"],
    ['gates/x.ts', "import { x } from '../store/x.js'"],
    ['gates/x.ts', "import { readFile } from 'node:fs'"],
    ['gates/x.ts', "import pino from 'pino'"],
    ['pipeline/x.ts', "import { x } from '../../../protocol/src/wire/x.js'"],
    ['pipeline/x.ts', "import { x } from '@spillway/client'"],
    ['pipeline/x.ts', "import { x } from 'spillway'"],
    ['pipeline/x.ts', "import { x } from '../../test/x.js'"],
    ['pipeline/x.ts', "const x = await import('../http/x.js')"],
    ['pipeline/x.ts', "export * from '../http/x.js'"],
    ['pipeline/x.test.ts', "import { x } from '../../../client/src/x.js'"],
    ['pipeline/x.test.ts', "import pg from 'pg'"],
    ['kitchen/x.ts', 'export {}'],
    ['http/x.ts', 'export const port = process.env.PORT'],
    ['http/x.ts', "export const port = process['env'].PORT"],
    ['http/x.ts', 'const { env } = process'],
    ['http/x.ts', "import { env } from 'node:process'"],
    ['cli/serve.ts', 'export const env = process.env'],
  ])('%s: %s', (file, source) => {
    expect(messages(`${src}/${file}`, source)).toHaveLength(1)
  })

  it.each([
    ['packages/protocol/src/schema/x.ts', "import { x } from 'spillway'"],
    ['packages/protocol/src/schema/x.ts', "import { x } from '@spillway/client'"],
    ['packages/protocol/src/wire/x.ts', "import { Type } from 'typebox'"],
    ['packages/protocol/src/wire/x.ts', "import { x } from '../schema/x.js'"],
    ['packages/client/src/x.ts', "import { x } from '@spillway/protocol/schema'"],
    ['packages/client/src/x.ts', "import { fetch } from 'undici'"],
    ['packages/client/src/x.ts', "import { once } from 'node:events'"],
    ['packages/embedded-postgres/src/x.ts', "import { x } from '@spillway/protocol/wire'"],
    ['packages/embedded-postgres/src/x.ts', "import { x } from 'spillway'"],
    ['packages/embedded-postgres/src/x.ts', "import pino from 'pino'"],
    ['packages/embedded-postgres/src/x.ts', 'export const path = process.env.PATH'],
    ['packages/spillway/src/pipeline/x.ts', "import { x } from '@spillway/embedded-postgres'"],
    ['packages/spillway/src/gates/x.ts', "import type { X } from '@spillway/embedded-postgres'"],
    ['packages/spillway/src/store/x.ts', "import { x } from '@spillway/embedded-postgres/internal'"],
    ['packages/console/src/x.ts', "import { x } from '@spillway/protocol/wire'"],
    ['packages/spillway/test/x.test.ts', "import { x } from '../../client/src/index.js'"],
  ])('%s: %s', (file, source) => {
    expect(messages(file, source)).toHaveLength(1)
  })
})

describe('rooms: right imports', () => {
  it.each([
    ['pipeline/x.ts', "import { y } from './y.js'\nimport { z } from '../gates/z.js'"],
    ['pipeline/x.ts', "import { problems } from '@spillway/protocol/wire'"],
    ['operations/x.ts', "import type { Store } from '../store/port.js'\nimport { setTimeout } from 'node:timers'"],
    ['gates/x.ts', "import type { Gate } from '../pipeline/gate.js'\nimport { y } from './y.js'"],
    ['gates/x.test.ts', "import { it } from 'vitest'\nimport { x } from './x.js'"],
    ['store/postgres/pool.ts', "import pg from 'pg'"],
    ['http/server.ts', "import fastify from 'fastify'\nimport swagger from '@fastify/swagger'"],
    [
      'workloads/petitions/x.ts',
      "import { createIntake } from '../../index.js'\nimport type { App } from '../../http/app.js'",
    ],
    ['workloads/petitions/x.ts', "import { y } from './y.js'\nimport { Type } from 'typebox'"],
    ['brokers/redis/x.ts', "import { Redis } from 'ioredis'"],
    ['config/x.ts', 'export const env = process.env'],
    ['cli/main.ts', 'run(process.argv, process.env)'],
    ['cli/main.ts', "import { cac } from 'cac'\nimport { x } from '../http/x.js'"],
    ['http/x.ts', '// process.env is read elsewhere'],
    ['index.ts', "export * from './pipeline/define.js'"],
    ['telemetry/x.ts', "import manifest from '../../package.json' with { type: 'json' }"],
  ])('%s: %s', (file, source) => {
    expect(messages(`${src}/${file}`, source)).toEqual([])
  })

  it.each([
    ['packages/embedded-postgres/src/x.ts', "import pg from 'pg'\nimport { spawn } from 'node:child_process'"],
    ['packages/embedded-postgres/src/x.test.ts', "import { it } from 'vitest'"],
    ['packages/embedded-postgres/src/programs.ts', 'export const path = process.env.PATH'],
    ['packages/spillway/src/store/x.ts', "const x = await import('@spillway/embedded-postgres')"],
    ['packages/client/src/x.ts', "import { x } from '@spillway/protocol/wire'"],
  ])('%s: %s', (file, source) => {
    expect(messages(file, source)).toEqual([])
  })
})
