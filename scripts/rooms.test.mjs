import { describe, expect, it } from 'vitest'
import { importsOf, violations } from './rooms.mjs'

const src = 'packages/spillway/src'
const server = 'packages/server/src'
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

  it('distinguishes a default import named type from a type-only one', () => {
    expect(importsOf("import type from './a.js'")[0]?.typeOnly).toBe(false)
  })
})

describe('rooms: wrong imports', () => {
  for (const room of ['core', 'accept', 'work', 'fleet', 'maintenance', 'streams', 'ledger', 'pressure']) {
    it(`${room} may not import http`, () => {
      expect(messages(`${src}/${room}/x.ts`, "import { y } from '../http/y.js'")).toEqual([
        `${room} may not import from http`,
      ])
    })
    for (const driver of ['pg', 'fastify']) {
      it(`${room} may not import ${driver}, not even its types`, () => {
        expect(messages(`${src}/${room}/x.ts`, `import type { y } from '${driver}'`)).toEqual([
          `${room} may not import the driver ${driver}`,
        ])
      })
    }
  }

  it.each([
    [`${src}/metrics/x.ts`, "import pg from 'pg'"],
    [`${src}/http/x.ts`, "import type { Pool } from 'pg'"],
    [`${src}/http/x.ts`, "import pino from 'pino'"],
    [`${src}/http/x.ts`, "import { request } from 'undici'"],
    [`${src}/store/x.ts`, "import fastify from 'fastify'"],
    [`${src}/gates/x.ts`, "import { x } from '../work/x.js'"],
    [`${src}/gates/x.ts`, "import { x } from '../store/x.js'"],
    [`${src}/gates/x.ts`, "import { readFile } from 'node:fs'"],
    [`${src}/core/x.ts`, "import { x } from '../../../protocol/src/wire/x.js'"],
    [`${src}/core/x.ts`, "import { x } from '@spillway/client'"],
    [`${src}/core/x.ts`, "import { x } from 'spillway'"],
    [`${src}/http/x.ts`, "import { x } from '@spillway/server'"],
    [`${src}/core/x.ts`, "import { x } from '../../test/x.js'"],
    [`${src}/core/x.ts`, "const x = await import('../http/x.js')"],
    [`${src}/core/x.ts`, "export * from '../http/x.js'"],
    [`${src}/core/x.test.ts`, "import { x } from '../../../client/src/x.js'"],
    [`${src}/core/x.test.ts`, "import pg from 'pg'"],
    [`${src}/kitchen/x.ts`, 'export {}'],
    [`${src}/http/x.ts`, 'export const port = process.env.PORT'],
    [`${server}/workloads/petitions/x.ts`, "import type { FastifyRequest } from 'fastify'"],
    [`${server}/workloads/petitions/x.ts`, "import pg from 'pg'"],
    [`${server}/workloads/petitions/x.ts`, "import { x } from '../../config/x.js'"],
    [`${server}/workloads/petitions/x.ts`, "import { x } from '../../prometheus/x.js'"],
    [`${server}/workloads/petitions/x.ts`, "import { x } from '../messages/x.js'"],
    [`${server}/workloads/petitions/x.ts`, "import { x } from '../../../../spillway/src/core/x.js'"],
    [`${server}/workloads/petitions/x.ts`, "import { x } from 'spillway'"],
    [`${server}/config/x.ts`, "import { x } from '../workloads/petitions/x.js'"],
    [`${server}/traffic/x.ts`, "import Redis from 'ioredis'"],
    [`${server}/auth/x.ts`, "import { x } from '../cli/x.js'"],
    [`${server}/traffic/x.ts`, "export const port = process['env'].PORT"],
    [`${server}/traffic/x.ts`, 'const { env } = process'],
    [`${server}/traffic/x.ts`, "import { env } from 'node:process'"],
    [`${server}/cli/serve.ts`, 'export const env = process.env'],
  ])('%s: %s', (file, source) => {
    expect(messages(file, source)).toHaveLength(1)
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
    ['packages/spillway/src/core/x.ts', "import { x } from '@spillway/embedded-postgres'"],
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
    ['work/x.ts', "import { y } from './y.js'\nimport { z } from '../gates/z.js'"],
    ['work/x.ts', "import { problems } from '@spillway/protocol/wire'"],
    ['core/x.ts', "import type { Store } from '../store/port.js'\nimport { setTimeout } from 'node:timers'"],
    ['gates/x.ts', "import type { Gate } from '../core/gate.js'\nimport { y } from './y.js'"],
    ['gates/x.test.ts', "import { it } from 'vitest'\nimport { x } from './x.js'"],
    ['store/postgres/pool.ts', "import pg from 'pg'"],
    ['http/route.ts', "import fastify from 'fastify'"],
    ['http/x.ts', '// process.env is read elsewhere'],
    ['index.ts', "export * from './intake/define.js'"],
  ])('%s: %s', (file, source) => {
    expect(messages(`${src}/${file}`, source)).toEqual([])
  })

  it.each([
    ['packages/embedded-postgres/src/x.ts', "import pg from 'pg'\nimport { spawn } from 'node:child_process'"],
    ['packages/embedded-postgres/src/x.test.ts', "import { it } from 'vitest'"],
    ['packages/embedded-postgres/src/programs.ts', 'export const path = process.env.PATH'],
    ['packages/spillway/src/store/x.ts', "const x = await import('@spillway/embedded-postgres')"],
    ['packages/client/src/x.ts', "import { x } from '@spillway/protocol/wire'"],
    [`${server}/app.ts`, "import fastify from 'fastify'\nimport swagger from '@fastify/swagger'"],
    [
      `${server}/workloads/petitions/x.ts`,
      "import { rate } from 'spillway/workload'\nimport type { App } from '../../app.js'",
    ],
    [`${server}/workloads/petitions/x.ts`, "import { y } from './y.js'\nimport { Type } from 'typebox'"],
    [`${server}/workloads/routing/x.ts`, "import type { CheckState } from '../../health.js'"],
    [`${server}/config/x.ts`, "import { x } from '../workloads/petitions/settings.js'"],
    [`${server}/brokers/redis/x.ts`, "import { Redis } from 'ioredis'"],
    [`${server}/config/x.ts`, 'export const env = process.env'],
    [`${server}/cli/main.ts`, 'run(process.argv, process.env)'],
    [`${server}/cli/main.ts`, "import { Command } from 'commander'\nimport { x } from '../auth/x.js'"],
    [`${server}/version.ts`, "import manifest from '../package.json' with { type: 'json' }"],
    ['packages/server/test/wire/x.test.ts', "import { x } from '../../../spillway/test/setup/database.js'"],
  ])('%s: %s', (file, source) => {
    expect(messages(file, source)).toEqual([])
  })
})
