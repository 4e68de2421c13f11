export { EmbeddedError, type EmbeddedErrorCode } from './error.js'
export type { ServerSettings } from './settings.js'
export { type EmbeddedLog, type EmbeddedOptions, type EmbeddedServer, startEmbedded } from './start.js'
