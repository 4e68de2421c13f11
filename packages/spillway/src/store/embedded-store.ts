import { resolve } from 'node:path'
import { startEmbedded } from './embedded/index.js'
import type { Store } from './port.js'
import type { Log } from './postgres/connect.js'
import { type PostgresOptions, postgresStore } from './postgres/store.js'

export interface EmbeddedOptions extends Omit<PostgresOptions, 'url'> {
  /** Default `./.spillway`. */
  dataDir?: string
}

/** `url`: for your own tables in the same database, e.g. to enqueue inside your own transactions. */
export type EmbeddedStore = Store & { readonly url: string }

const silent: Log = { info: () => undefined, warn: () => undefined, error: () => undefined }

/** The same store on a PostgreSQL server of our own, started in a folder and stopped with the store. */
export async function embedded(options: EmbeddedOptions = {}): Promise<EmbeddedStore> {
  const { dataDir, ...rest } = options
  const server = await startEmbedded({ dataDir: resolve(dataDir ?? '.spillway'), log: options.log ?? silent })
  const store = postgresStore({ ...rest, url: server.url })
  return {
    ...store,
    url: server.url,
    close: async () => {
      await store.close()
      await server.stop()
    },
  }
}
