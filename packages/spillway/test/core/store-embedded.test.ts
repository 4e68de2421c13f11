import { afterAll, beforeAll } from 'vitest'
import { type OpenStore, storesOn } from '../conformance/harness.js'
import { freshDatabase, type TestDatabase } from '../setup/database.js'
import { storeConformance } from '../store-conformance.js'

let database: TestDatabase
let open: OpenStore

beforeAll(async () => {
  database = await freshDatabase()
  open = storesOn(database.url)
})
afterAll(() => database.drop())

storeConformance('the embedded PostgreSQL', () => open())
