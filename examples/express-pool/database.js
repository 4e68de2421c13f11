/** For vitest: a PostgreSQL for this run. The shop has tables of its own, so it does not share that of other tests. */
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { startEmbedded } from '@spillway/embedded-postgres'

export default async function setup(project) {
  const dataDir = await mkdtemp(join(tmpdir(), 'spillway-express-pool-'))
  const server = await startEmbedded({ dataDir })
  project.provide('url', server.url)
  return async () => {
    await server.stop()
    await rm(dataDir, { recursive: true, force: true })
  }
}
