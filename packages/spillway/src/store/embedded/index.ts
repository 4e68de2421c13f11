export { type EmbeddedServer, startEmbedded } from './start.js'
