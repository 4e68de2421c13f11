/** What is started from deploy/ starts: settings by the configuration, files by the programs that read them. */
import { execFile } from 'node:child_process'
import { existsSync, readdirSync, readFileSync } from 'node:fs'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { describe, expect, it } from 'vitest'
import { loadConfig } from '../src/config/index.js'
import { findNats } from './setup/nats.js'
import { findPromtool, promtoolTests } from './setup/promtool.js'

const root = fileURLToPath(new URL('../../../', import.meta.url))
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

const secrets = { 'database-url': 'postgres://u:p@db:5432/spillway', 'nats-url': 'nats://u:p@nats:4222' }

describe('docker-compose.yml', () => {
  const compose = read('deploy/docker-compose.yml')
  const services = compose.slice(compose.indexOf('\nservices:\n'))
  const service = (name: string) => new RegExp(`^ {2}${name}:\\n((?: {4}.+\\n)+)`, 'm').exec(services)?.[1] ?? ''

  it.each([
    ['gateway', ['gateway']],
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
    expect(hosts).toHaveLength(6)
    expect(hosts.filter((host) => !service(host).includes('*spillway'))).toEqual([])
  })

  it('keeps what the longest objective looks back on', () => {
    expect(Number(/retention\.time=(\d+)d/.exec(compose)?.[1])).toBeGreaterThan(30)
  })
})

describe('kubernetes/spillway.yml', () => {
  const documents = read('deploy/kubernetes/spillway.yml').split(/^---$/m)
  const workloads = documents.filter((text) => /^kind: (?:Deployment|StatefulSet)$/m.test(text))

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
  })

  it('gives a drain the time that it takes, and probes what is there', () => {
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

  it('the configuration of NATS is taken by every server; the synced one by those that know how', async ({ skip }) => {
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

  it('the Dockerfile copies what exists and is let through, and runs as nobody in particular', () => {
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

  it('each is told of in README.md, which links to what exists', () => {
    const text = read('deploy/README.md')
    const files = readdirSync(deploy, { recursive: true, withFileTypes: true })
      .filter((entry) => entry.isFile() && !['README.md', '.gitignore'].includes(entry.name))
      .map(({ name }) => name)
    expect(files.filter((name) => !text.includes(name))).toEqual([])
    const links = matches(text, /\]\((?!https?:|#)([^)#\s]+)/g)
    expect(links.filter((link) => !existsSync(join(deploy, link)))).toEqual([])
  })
})
