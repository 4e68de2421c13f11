import { type Config, type Environment, loadConfig, processEnvironment } from '../config/index.js'
import { createLogger } from '../logs.js'
import { exitCodes } from './exit.js'
import { runUntilSignal } from './signals.js'
import type { Terminal } from './terminal.js'

export interface ServeOptions {
  /** `worker` only runs operations, and listens only if a port is given. */
  readonly only?: 'worker'
  readonly host?: string | undefined
  readonly port?: string | undefined
}

/** Runs until a signal ends it. */
export async function serve(
  terminal: Terminal,
  options: ServeOptions,
  environment: Environment = processEnvironment(),
): Promise<number> {
  const { config, warnings } = configFor(options, environment)
  const log = createLogger({ level: config.process.logLevel })
  for (const warning of warnings) log.warn({}, warning)
  const { runServer } = await import('../serve.js')
  try {
    await runUntilSignal(() => runServer(config, log), {
      signals: process,
      exit: (code) => process.exit(code),
      onStart: ({ address }) =>
        terminal.err(
          config.listen
            ? greeting(address, {
                isGateway: config.process.roles.includes('gateway'),
                mayCallItself: config.operations.forwardAllow === null,
              })
            : workerGreeting,
        ),
      onSignal: (signal) => {
        log.info({ signal, drainSeconds: config.server.drainSeconds }, 'draining; a second signal ends at once')
      },
    })
  } finally {
    // Open handles must not keep the process alive. The timer is unreferenced, so it fires only in that case.
    setTimeout(() => process.exit(), exitGraceMs).unref()
  }
  return exitCodes.done
}

const exitGraceMs = 1_000

/** Flags override the environment and are checked by the same rules. */
export function configFor(
  options: ServeOptions,
  environment: Environment,
): { config: Config; warnings: readonly string[] } {
  const { config, sources, warnings } = loadConfig({
    ...environment,
    ...(options.host === undefined ? {} : { SPILLWAY_HOST: options.host }),
    ...(options.port === undefined ? {} : { SPILLWAY_PORT: options.port }),
  })
  if (options.only !== 'worker') return { config, warnings }
  return {
    config: {
      ...config,
      process: { ...config.process, roles: ['worker'] },
      listen: sources.get('SPILLWAY_PORT') === 'environment',
    },
    warnings,
  }
}

const workerGreeting = 'Spillway works on operations; it listens nowhere (--port opens a port).\n'

/** `address`: host:port, or an origin. Shown on standard error: standard output belongs to the log lines. */
export function greeting(address: string, { isGateway = true, mayCallItself = true } = {}): string {
  const origin = (address.includes('://') ? address : `http://${address}`).replace(/\/+$/u, '')
  // Without the gateway role no work is accepted; with a configured target list the demo here is not allowed.
  if (!isGateway || !mayCallItself) return `Spillway listens on ${origin}\n\nTry it:\n  curl ${origin}/health\n\n`
  const call = JSON.stringify({
    type: 'http.request',
    queue: 'demo',
    payload: { url: `${origin}/demo/echo`, body: { hello: 'world' } },
  })
  return `Spillway listens on ${origin}

Try it:
  curl -X POST ${origin}/api/v1/operations -H 'content-type: application/json' -d '${call}'

`
}
