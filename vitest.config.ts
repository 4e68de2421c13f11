/**
 * Tests stand in storeys, each a folder (or the sources, for unit tests). `npm test` runs unit, core and smoke; `npm run test:all`
 * runs everything. A storey's folder says what its tests may need:
 *
 *   unit    nothing outside the process                     packages/<name>/src, scripts, bench, chaos
 *   core    a database, in process                          test/core
 *   smoke   a real server: one file for each workload       test/wire, listed below
 *   wire    real servers, brokers and browsers              test/wire, and what is listed as `later`
 *   faults  processes that are killed, stopped, cut off     test/faults
 */
import { defineConfig } from 'vitest/config'

const tests = 'packages/{spillway,server}/test'
const smoke = [
  ...[
    'docs-readme',
    'server-tickets',
    'server-petitions',
    'server-messages',
    'generation-native',
    'routing-input-subject',
  ],
].map((name) => `packages/server/test/wire/${name}.test.ts`)

/** Tests of the lower storeys that take long, or start servers: not for `npm test`. */
const later = [
  'packages/spillway/test/core/{store-embedded,library-pool,pipeline-load}.test.ts',
  'packages/server/test/core/{brokers-nats,brokers-nats-taking,stream-log-redis}.test.ts',
  'packages/client/test/**/*.test.ts',
  'bench/overload-generator.test.ts',
]
const notLater = later.map((file) => `!${file}`)

/** Most tests wait for servers and databases: on two cores, where the default is one at a time, two take half as long. */
const beside = { maxWorkers: 2, sequence: { groupOrder: 0 } }

/** Tests of the server see the library's sources, not its build: a class must not be there twice. */
const resolve = {
  alias: [
    { find: /^spillway$/, replacement: `${import.meta.dirname}/packages/spillway/src/index.ts` },
    { find: /^spillway\/testing$/, replacement: `${import.meta.dirname}/packages/spillway/src/testing/index.ts` },
    { find: /^spillway\/workload$/, replacement: `${import.meta.dirname}/packages/spillway/src/workload.ts` },
  ],
}

const storey = (name: string, include: string[], options: object = beside) => ({
  resolve,
  test: { name, include, testTimeout: 30_000, hookTimeout: 60_000, pool: 'forks' as const, ...options },
})

export default defineConfig({
  resolve,
  test: {
    globalSetup: ['packages/server/test/setup/global.ts'],
    pool: 'forks',
    maxWorkers: 2,
    projects: [
      storey('unit', [
        'packages/*/src/**/*.test.ts',
        'scripts/**/*.test.mjs',
        'bench/*.test.ts',
        'bench/{load,plots,programs,sections}/**/*.test.ts',
        'chaos/**/*.test.ts',
        '!chaos/broken.test.ts',
        ...notLater,
      ]),
      storey('core', [`${tests}/core/**/*.test.ts`, ...notLater]),
      storey('smoke', smoke),
      storey('wire', [`${tests}/wire/**/*.test.ts`, ...later, ...smoke.map((file) => `!${file}`)]),
      storey('faults', [`${tests}/faults/**/*.test.ts`, 'chaos/broken.test.ts']),
    ],
    // Only with --coverage. The rooms that decide about acceptance, order and limits; elsewhere a figure says little.
    coverage: {
      provider: 'v8',
      include: ['packages/spillway/src/{gates,intake,accept,work,fleet}/**/*.ts'],
      exclude: ['**/*.test.ts'],
      reporter: ['text', 'html', 'json-summary'],
      thresholds: { branches: 90 },
    },
  },
})
