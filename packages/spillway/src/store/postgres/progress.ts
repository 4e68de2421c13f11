/** Progress of running operations: see sql/functions/progress.sql. */
import type { Progress } from '../../work/progress.js'
import { plainArray, textArray } from './arrays.js'
import type { Database } from './database.js'

export function progressStatements({ s, on }: Database) {
  return {
    keepProgress: async (said: readonly Progress[], ended: readonly string[]): Promise<void> => {
      await on.settle(`SELECT ${s}.progress_keep($1, $2, $3, $4, $5)`, [
        plainArray(said.map(({ id }) => id)),
        plainArray(said.map(({ attempt }) => attempt)),
        plainArray(said.map(({ value }) => value)),
        textArray(said.map(({ note }) => note)),
        plainArray(ended),
      ])
    },
  }
}
