/** Internal parts, for our own tests. No stability guarantee. */

export { type Account, handOverTree, nobody, serverAccounts } from './account.js'
export { prepareRuntime } from './binaries.js'
export { placeCluster, readPassword } from './cluster.js'
export { isAlive, waitForExit } from './processes.js'
export { freePort, spawnServer, waitUntilReady } from './server.js'
export { openServerLog } from './server-log.js'
export { serverSettings } from './settings.js'
