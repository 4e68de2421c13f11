import { afterAll, beforeAll, it } from 'vitest'
import { type OpenStore, storesOn } from '../conformance/harness.js'
import { findPostgres15, type TestServer } from '../setup/postgres15.js'
import { storeConformance } from '../store-conformance.js'

const found = await findPostgres15()

if ('start' in found) {
  let server: TestServer | undefined
  let open: OpenStore

  beforeAll(async () => {
    server = await found.start()
    open = storesOn(server.url)
  })
  afterAll(() => server?.stop())

  storeConformance('PostgreSQL 15', () => open())
} else {
  if (process.env.CI) throw new Error(found.missing)
  process.stderr.write(`store-postgres.test.ts is left out: ${found.missing}\n`)
  it('the store on PostgreSQL 15', ({ skip }) => skip(found.missing))
}
