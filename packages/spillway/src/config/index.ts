export { type ConfigRow, describeConfig } from './describe.js'
export {
  type ClientConfig,
  type Config,
  ConfigError,
  type ConfigProblem,
  type ConfigSource,
  type Environment,
  isAuthenticationOn,
  isDebugging,
  isLoopbackHost,
  type LoadedConfig,
  loadClientConfig,
  loadConfig,
  processEnvironment,
} from './load.js'
export { maskUrlPasswords } from './secrets.js'
export type { LogLevel, Role } from './settings.js'
