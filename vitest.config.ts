import { defineConfig } from 'vitest/config'

export default defineConfig({
  test: {
    include: [
      'packages/*/src/**/*.test.ts',
      'packages/*/test/**/*.test.ts',
      'scripts/**/*.test.mjs',
      'bench/*.test.ts',
      'bench/{load,plots,programs,sections}/**/*.test.ts',
      'chaos/**/*.test.ts',
    ],
    globalSetup: ['packages/spillway/test/setup/global.ts'],
    testTimeout: 30_000,
    hookTimeout: 60_000,
    pool: 'forks',
    // Most of these tests wait for servers and databases: on two cores, where the default is one at a time, two take half as long.
    maxWorkers: 2,
    // Only with --coverage. The rooms that decide about acceptance, order and limits; elsewhere a figure says little.
    coverage: {
      provider: 'v8',
      include: ['packages/spillway/src/{gates,pipeline,operations}/**/*.ts'],
      exclude: ['**/*.test.ts'],
      reporter: ['text', 'html', 'json-summary'],
      thresholds: { branches: 90 },
    },
  },
})
