import { ConfigError, type Environment, type LoadedConfig, loadConfig } from '../../config/index.js'
import { exitCodes } from '../exit.js'
import type { Terminal } from '../terminal.js'
import { type Finding, right, wrong } from './finding.js'
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
  const problems = findings.filter((finding) => finding.state === 'wrong').length
  if (options.json) terminal.out(`${JSON.stringify({ ok: problems === 0, findings })}\n`)
  else
    terminal.out(`\n${problems === 0 ? 'No problems' : problems === 1 ? '1 problem' : `${problems} problems`} found.\n`)
  return problems === 0 ? exitCodes.done : exitCodes.failed
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
  yield right('configuration', `${set} set, the rest by default (spillway config lists them)`)
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
    return error.problems.map(({ name, message }) => wrong('configuration', message, `change or unset ${name}`))
  }
}

const signs = { right: '✓', hint: '!', wrong: '✗' } as const

function lineOf({ name, state, detail, fix }: Finding): string {
  const line = `${signs[state]} ${name}: ${detail}\n`
  return fix === undefined ? line : `${line}    → ${fix}\n`
}
