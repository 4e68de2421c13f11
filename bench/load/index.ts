import type { Children } from '../children.js'
import { autocannonGenerator } from './autocannon.js'
import type { LoadGenerator } from './load.js'
import { findWrk, wrkGenerator } from './wrk.js'

export type { Load, LoadGenerator, LoadResult } from './load.js'

/** Chooses the load generator of this run; what it starts belongs to the section's children. */
export async function chooseLoadGenerator(say: (text: string) => void): Promise<(children: Children) => LoadGenerator> {
  const wrk = await findWrk(say)
  return wrk === null ? autocannonGenerator : (children) => wrkGenerator(wrk, children)
}
