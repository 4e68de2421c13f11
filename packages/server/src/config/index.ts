export { describeConfig } from './describe.js'
export {
  type Config,
  ConfigError,
  type Environment,
  isDebugging,
  isLoopbackHost,
  type LoadedConfig,
  loadClientConfig,
  loadConfig,
  processEnvironment,
} from './load.js'
export { maskUrlPasswords } from './secrets.js'
export type { LogLevel } from './settings.js'
