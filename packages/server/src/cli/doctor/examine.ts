import { ConfigError, type Environment, type LoadedConfig, loadConfig } from '../../config/index.js'
import { exitCodes } from '../exit.js'
import type { Terminal } from '../terminal.js'
import type { Finding } from './finding.js'
import { checkApiKeysFile, checkBinaries, checkDataDir, checkNode, checkPort } from './machine.js'

/** Checks everything that a start depends on, changes nothing, and says how to fix each problem. */
export async function examine(
  terminal: Terminal,
  options: { json: boolean; environment?: Environment },
): Promise<number> {
  const findings: Finding[] = []
  for await (const finding of examinations(options.environment)) {
    findings.push(finding)
    if (!options.json) terminal.out(lineOf(finding))
  }
  const wrong = findings.filter((finding) => finding.state === 'wrong').length
  if (options.json) terminal.out(`${JSON.stringify({ ok: wrong === 0, findings })}\n`)
  else terminal.out(`\n${wrong === 0 ? 'No problems' : wrong === 1 ? '1 problem' : `${wrong} problems`} found.\n`)
  return wrong === 0 ? exitCodes.done : exitCodes.failed
}

async function* examinations(environment: Environment | undefined): AsyncGenerator<Finding> {
  yield checkNode()
  const loaded = tryLoading(environment)
  if (Array.isArray(loaded)) {
    yield* loaded
    return
  }
  const { config, warnings } = loaded
  const set = [...loaded.sources.values()].filter((source) => source === 'environment').length
  yield {
    name: 'configuration',
    state: 'right',
    detail: `${set} set, the rest by default (spillway config lists them)`,
  }
  for (const warning of warnings) yield { name: 'configuration', state: 'hint', detail: warning }
  if (config.auth.apiKeysFile !== null) yield await checkApiKeysFile(config.auth.apiKeysFile)
  yield await checkPort(config.server)
  if (config.routing.natsUrls !== null) {
    const { checkBroker } = await import('./broker.js')
    yield await checkBroker(config.routing.natsUrls.join(','))
  }
  if (config.generation.redisUrl !== null) {
    const { checkRedis } = await import('./redis.js')
    yield await checkRedis(config.generation.redisUrl)
  }
  const { url, listenUrl, schema, dataDir } = config.store
  yield checkBinaries(url === null)
  if (url === null) {
    yield* await checkDataDir(dataDir)
    return
  }
  const { checkDatabase } = await import('./database.js')
  const { coreSql } = await import('spillway/workload')
  const { workloadSql } = await import('../../workload-list.js')
  yield* await checkDatabase({ url, listenUrl, schema, sql: [coreSql, ...workloadSql] })
}

function tryLoading(environment: Environment | undefined): LoadedConfig | Finding[] {
  try {
    return loadConfig(environment)
  } catch (error) {
    if (!(error instanceof ConfigError)) throw error
    return error.problems.map(({ name, message }) => ({
      name: 'configuration',
      state: 'wrong',
      detail: message,
      fix: `change or unset ${name}`,
    }))
  }
}

const signs = { right: '✓', hint: '!', wrong: '✗' } as const

function lineOf({ name, state, detail, fix }: Finding): string {
  const line = `${signs[state]} ${name}: ${detail}\n`
  return fix === undefined ? line : `${line}    → ${fix}\n`
}
