export { EmbeddedError, type EmbeddedErrorCode } from './error.js'
export { type EmbeddedOptions, type EmbeddedServer, startEmbedded } from './start.js'
