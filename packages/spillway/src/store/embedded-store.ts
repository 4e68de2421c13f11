import { resolve } from 'node:path'
import { startEmbedded } from './embedded-package.js'
import type { Store } from './port.js'
import { type PostgresOptions, postgresStore } from './postgres/store.js'

export interface EmbeddedOptions extends Omit<PostgresOptions, 'url' | 'pool'> {
  /** Default `./.spillway`. */
  dataDir?: string
}

/** `url`: for your own tables in the same database, e.g. to enqueue inside your own transactions. */
export type EmbeddedStore = Store & { readonly url: string }

/**
 * The same store on our own PostgreSQL server, started in a folder and stopped with the store. Needs the package
 * @spillway/embedded-postgres.
 */
export async function embedded(options: EmbeddedOptions = {}): Promise<EmbeddedStore> {
  const { dataDir, ...rest } = options
  const server = await startEmbedded({
    dataDir: resolve(dataDir ?? '.spillway'),
    ...(options.log && { log: options.log }),
  })
  const store = postgresStore({ ...rest, url: server.url })
  return {
    ...store,
    url: server.url,
    close: async (waitMs) => {
      await store.close(waitMs)
      await server.stop()
    },
  }
}
