/** What is started from deploy/ starts: settings by the configuration, files by the programs that read them. */
import { execFile, execFileSync } from 'node:child_process'
import { existsSync, readdirSync, readFileSync } from 'node:fs'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { describe, expect, it } from 'vitest'
import { findNats } from '../../../spillway/test/setup/nats.js'
import { checkNginxConfig, findNginx, shippedConfig } from '../../../spillway/test/setup/nginx.js'
import { findPromtool, promtoolTests } from '../../../spillway/test/setup/promtool.js'
import { loadConfig } from '../../src/config/index.js'

const root = fileURLToPath(new URL('../../../../', import.meta.url))
const deploy = join(root, 'deploy')
const read = (file: string): string => readFileSync(join(root, file), 'utf8')
const matches = (text: string, pattern: RegExp): string[] => [...text.matchAll(pattern)].map((match) => match[1] ?? '')
const withPromtool = promtoolTests(await findPromtool())

/** `NAME: value` lines below a line, deeper than it. */
function mapBelow(text: string, line: string): Record<string, string> {
  const [, indent = '', body = ''] = new RegExp(`^( *)${line}\\n((?:\\1 {2}.+\\n)+)`, 'm').exec(text) ?? []
  const entries = [...body.matchAll(/^ +([A-Z][A-Z0-9_]+): (.+)$/gm)]
  expect(entries.length, `${indent}${line}`).toBeGreaterThan(0)
  return Object.fromEntries(entries.map(([, name, value = '']) => [name, value.replaceAll("'", '')]))
}

const secrets = {
  'database-url': 'postgres://u:p@db:5432/spillway',
  'nats-url': 'nats://u:p@nats:4222',
  'redis-url': 'redis://:p@redis:6379',
}

/** deploy/nginx.conf as the `sed` of a container's command leaves it. */
function editedForContainer(text: string): string {
  const command = /^ +(sed -e .+) \/etc\/spillway\/nginx\.conf > \/tmp\/nginx\.conf &&$/m.exec(text)?.[1] ?? 'false'
  return execFileSync('sh', ['-c', command], { input: shippedConfig(), encoding: 'utf8' })
}

const gatewaysOf = (config: string): string[] => matches(config, /^ +server (\S.*);$/gm)

describe('docker-compose.yml', () => {
  const compose = read('deploy/docker-compose.yml')
  const services = compose.slice(compose.indexOf('\nservices:\n'))
  const service = (name: string) => new RegExp(`^ {2}${name}:\\n((?: {4}.+\\n)+)`, 'm').exec(services)?.[1] ?? ''

  it.each([
    ['gateway-1', ['gateway']],
    ['gateway-2', ['gateway']],
    ['router-1', ['router']],
    ['router-2', ['router']],
    ['worker', ['worker']],
  ])('starts %s with settings that the server takes', (name, roles) => {
    expect(service(name)).toContain('<<: *spillway')
    const given = { ...mapBelow(compose, 'x-environment: &environment'), ...mapBelow(service(name), 'environment:') }
    const filled = Object.entries(given).map(([key, value]) => [key, value.replaceAll(/\$\{[^}]+\}/g, 'secret')])
    const { config, warnings } = loadConfig(Object.fromEntries(filled))
    expect(warnings).toEqual([])
    expect(config.process.roles).toEqual(roles)
    expect(config.routing.natsUrls).toEqual(['nats://spillway:secret@nats:4222'])
    expect(config.generation.redisUrl).toBe('redis://:secret@redis:6379')
  })

  it('puts nginx before the gateways, which trust only it', () => {
    const settings = ' max_fails=3 fail_timeout=5s'
    expect(gatewaysOf(editedForContainer(service('nginx')))).toEqual([
      `gateway-1:7745${settings}`,
      `gateway-2:7745${settings}`,
    ])
    const address = /ipv4_address: (\S+) /.exec(service('nginx'))?.[1]
    expect(address).toBeDefined()
    for (const gateway of [service('gateway-1'), service('gateway-2')]) {
      expect(mapBelow(gateway, 'environment:').SPILLWAY_TRUSTED_PROXIES).toBe(address)
      expect(gateway).not.toContain('ports:')
    }
  })

  it('mounts files that exist', () => {
    const mounted = matches(compose, /(?:- |\['|')\.\/([\w./-]+):\//g)
    expect(mounted.length).toBeGreaterThan(5)
    expect(mounted.filter((path) => !existsSync(join(deploy, path)))).toEqual([])
  })

  it('has every service that Prometheus is to scrape and the gateway is to ask', () => {
    const hosts = [
      ...matches(read('deploy/prometheus/prometheus.yml'), /'([\w-]+):7745'/g),
      ...matches(compose, /http:\/\/([\w-]+):7745\/metrics/g),
    ]
    expect(new Set(hosts)).toEqual(new Set(['gateway-1', 'gateway-2', 'router-1', 'router-2', 'worker']))
    expect(hosts.filter((host) => !service(host).includes('*spillway'))).toEqual([])
  })

  it('keeps what the longest objective looks back on', () => {
    expect(Number(/retention\.time=(\d+)d/.exec(compose)?.[1])).toBeGreaterThan(30)
  })
})

describe('kubernetes/spillway.yml', () => {
  const documents = read('deploy/kubernetes/spillway.yml').split(/^---$/m)
  const workloads = documents.filter((text) => /^ +image: spillway:/m.test(text))
  const nginx = documents.find((text) => /^ +image: nginx/m.test(text)) ?? ''

  it('starts each role with settings that the server takes, the secrets by reference', () => {
    const configs = workloads.map((text) => {
      const entries = [...text.matchAll(/- name: ([A-Z][A-Z0-9_]+)\n +value(?:From)?: (.+)$/gm)]
      const values = entries.map(([, name, value = '']) => {
        const key = /secretKeyRef: \{ name: spillway, key: (\S+) \}/.exec(value)?.[1]
        return [name, key === undefined ? value.replaceAll("'", '') : secrets[key as keyof typeof secrets]]
      })
      return loadConfig(Object.fromEntries(values))
    })
    expect(configs.map(({ config }) => config.process.roles)).toEqual([['gateway'], ['router'], ['worker']])
    expect(configs.flatMap(({ warnings }) => warnings)).toEqual([])
    expect(configs.map(({ config }) => config.store.url)).toEqual(Array(3).fill(secrets['database-url']))
    expect(configs.map(({ config }) => config.routing.natsUrls)).toEqual(Array(3).fill([secrets['nats-url']]))
    const redisUrls = configs.map(({ config }) => config.generation.redisUrl)
    expect(redisUrls).toEqual([secrets['redis-url'], null, secrets['redis-url']])
  })

  it('puts nginx before the Service of the gateways, and lets its streams end', () => {
    const server = 'spillway-gateway:7745 max_fails=0'
    expect(gatewaysOf(editedForContainer(nginx))).toEqual([server, server])
    expect(documents.filter((text) => /^kind: Service$[\s\S]*name: spillway-gateway$/m.test(text))).toHaveLength(1)
    const longestStream = loadConfig({}).config.generation.totalSeconds
    expect(Number(/terminationGracePeriodSeconds: (\d+)/.exec(nginx)?.[1])).toBeGreaterThan(longestStream)
  })

  it('gives a drain the time that it takes, and probes existing routes', () => {
    for (const text of workloads) {
      const drain = Number(/SPILLWAY_DRAIN_SECONDS\n +value: '(\d+)'/.exec(text)?.[1])
      expect(Number(/terminationGracePeriodSeconds: (\d+)/.exec(text)?.[1])).toBeGreaterThan(drain + 5)
      expect(text).toMatch(/readinessProbe:\n +httpGet: \{ path: \/health\/ready, port: http \}/)
      expect(text).toMatch(/livenessProbe:\n +httpGet: \{ path: \/health\/live, port: http \}/)
    }
  })

  it('asks as many routers as there are', () => {
    const replicas = Number(/^kind: StatefulSet$[\s\S]*? {2}replicas: (\d+)$/m.exec(workloads.join('---'))?.[1])
    const asked = matches(workloads.join('---'), /\/\/(spillway-router-\d+)\.spillway-router:7745\/metrics/g)
    expect(asked).toEqual(Array.from({ length: replicas }, (_, n) => `spillway-router-${n}`))
  })
})

describe('files for other programs', () => {
  it.for([
    'docker-compose.yml',
    'kubernetes/spillway.yml',
    'grafana/provisioning/datasources/prometheus.yml',
    'grafana/provisioning/dashboards/spillway.yml',
  ])('%s is YAML', async (file, { skip }) => {
    const folder = await mkdtemp(join(tmpdir(), 'spillway-deploy-'))
    // Its own settings are not in there, and it says so of each; but first it has to read the file.
    const check = withPromtool(async (promtool) => {
      for (const text of read(`deploy/${file}`).split(/^---$/m)) {
        await writeFile(join(folder, 'part.yml'), text)
        const { output } = await promtool(['check', 'config', 'part.yml'], folder)
        expect(output).toMatch(/yaml: unmarshal errors:\n +line \d+: field \S+ not found/)
      }
    })
    await check({ skip }).finally(() => rm(folder, { recursive: true, force: true }))
  })

  it.for(['docker-compose.yml', 'kubernetes/spillway.yml'])(
    'nginx takes what %s makes of its configuration',
    async (file, { skip }) => {
      const found = await findNginx()
      if ('missing' in found) return skip(found.missing)
      // Names that are known there only.
      const config = editedForContainer(read(`deploy/${file}`)).replaceAll(/(?<=^ +server )[\w-]+(?=:)/gm, 'localhost')
      const { ok, output } = await checkNginxConfig(found.program, config)
      expect(ok, output).toBe(true)
    },
  )

  it('the configuration of NATS is accepted by every server; the synced one by those that support it', async ({
    skip,
  }) => {
    const found = await findNats()
    if ('missing' in found) return skip(found.missing)
    const nats = (...args: string[]) =>
      new Promise<string>((resolve) => {
        const env = { NATS_NAME: 'nats-1', NATS_PASSWORD: "'0e1-starts-with-a-digit'" }
        execFile(found.program, args, { cwd: join(deploy, 'nats'), env }, (_, stdout, stderr) =>
          resolve(stdout + stderr),
        )
      })
    const [major = 0, minor = 0] = matches(await nats('--version'), /(\d+)\./g).map(Number)
    expect(await nats('-t', '-c', 'nats.conf')).toContain('is valid')
    const isNew = major > 2 || minor >= 10
    expect(await nats('-t', '-c', 'nats-synced.conf')).toMatch(isNew ? /is valid/ : /unknown field "sync_interval"/)
  })

  it('the Dockerfile copies existing and included files, and runs as an unprivileged user', () => {
    const text = read('deploy/Dockerfile')
    const copied = matches(text, /^COPY (?!--)(.+) \S+$/gm).flatMap((names) => names.split(' '))
    expect(copied).toContain('package-lock.json')
    expect(copied.filter((name) => !existsSync(join(root, name)))).toEqual([])
    const letThrough = matches(read('deploy/Dockerfile.dockerignore'), /^!(.+)$/gm)
    expect(copied.toSorted()).toEqual(letThrough.toSorted())
    expect(text).toMatch(/^USER node$/m)
    expect(text).toMatch(/^HEALTHCHECK [\s\S]*\/health\/live/m)
    expect(existsSync(join(root, /ENTRYPOINT \["node", "([^"]+)"\]/.exec(text)?.[1] ?? 'none'))).toBe(true)
  })

  it('each is named in README.md, which links only to files that exist', () => {
    const text = read('deploy/README.md')
    const files = readdirSync(deploy, { recursive: true, withFileTypes: true })
      .filter((entry) => entry.isFile() && !['README.md', '.gitignore'].includes(entry.name))
      .map(({ name }) => name)
    expect(files.filter((name) => !text.includes(name))).toEqual([])
    const links = matches(text, /\]\((?!https?:|#)([^)#\s]+)/g)
    expect(links.filter((link) => !existsSync(join(deploy, link)))).toEqual([])
  })
})
