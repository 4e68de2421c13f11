/** The browser build in Chromium: the page is the proxy's, so that its connections can be dropped. */
import type { Browser, Page } from 'playwright-core'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { bundledClient } from './bundle.js'
import { findChromium, launchChromium } from './chromium.js'
import { type FaultProxy, refusal, startFaultProxy } from './fault-proxy.js'
import { type RunningServer, runningServer } from './running-server.js'
import { type ScriptedModel, startScriptedModel, tokensOf } from './scripted-model.js'

const program = findChromium()

describe.runIf(program !== null)('in a page', () => {
  let server: RunningServer
  let model: ScriptedModel
  let proxy: FaultProxy
  let browser: Browser
  let page: Page

  beforeAll(async () => {
    model = await startScriptedModel()
    server = await runningServer({ GENERATION_UPSTREAM_URL: model.url, SPILLWAY_CORS_ORIGINS: '*' })
    proxy = await startFaultProxy(server.origin)
    proxy.host('/page', 'text/html', '<!doctype html><title>client</title>')
    proxy.host('/client.js', 'text/javascript', await bundledClient())
    browser = await launchChromium(program ?? '')
    page = await browser.newPage()
    await page.goto(`${proxy.origin}/page`)
  })
  afterAll(async () => {
    await browser?.close()
    await proxy?.close()
    await server?.stop()
    await model?.close()
  })

  /** Runs there; `client` is one of the page's, `origin` the server's own. */
  const inPage = <T>(body: string): Promise<T> =>
    page.evaluate(
      `(async () => {
        const { createClient } = await import('/client.js')
        const origin = ${JSON.stringify(server.origin)}
        const client = createClient({ baseUrl: location.origin, identity: 'page' })
        ${body}
      })()`,
    )

  it('pushes and pops, over a dropped connection and a refusal', async () => {
    proxy.plan('/push', { kind: 'drop', when: 'after' }, refusal(503, '0'))
    const seen = await inPage(`
      const { messages } = await client.push('page', [{ n: 1 }, { n: 2 }])
      const taken = await client.messages.pop('page', { batch: 10 })
      const acks = await client.messages.ack(taken)
      return [messages.map(({ status }) => status), taken.map(({ data }) => data.n), acks.map(({ success }) => success)]`)
    expect(seen).toEqual([
      ['queued', 'queued'],
      [1, 2],
      [true, true],
    ])
  })

  it('does not follow a redirect', async () => {
    proxy.plan('/push', { kind: 'answer', status: 302, headers: { location: '/api/v1/operations' }, body: '' })
    const seen = await inPage(`
      const { code, status, retryable, attempts } = await client.push('redirected', [1]).catch((error) => error)
      return { code, status, retryable, attempts }`)
    expect(seen).toEqual({ code: 'unexpected', status: null, retryable: false, attempts: 1 })
  })

  it('generates, over dropped connections', async () => {
    proxy.plan('/api/v1/stream', { kind: 'cut', behind: '"content":"5 "' })
    proxy.plan('/api/v1/streams/', { kind: 'cut', behind: '"content":"12 "' })
    const seen = await inPage<{ text: string; indexes: number[] }>(`
      let text = ''
      const indexes = []
      for await (const { content, index } of client.generate({ query: 'tokens=20 every=10', model: 'm' })) {
        text += content
        indexes.push(index)
      }
      return { text, indexes }`)
    expect(seen.text).toBe(tokensOf(20))
    expect(seen.indexes).toEqual(seen.indexes.map((_, i) => i))
    expect(proxy.seen.filter(({ path }) => path.startsWith('/api/v1/streams/')).length).toBeGreaterThanOrEqual(2)
  })

  it('speaks to a server of another origin, and reads its stream', async () => {
    const text = await inPage(`
      const far = createClient({ baseUrl: origin, identity: 'far' })
      const generation = far.generate({ query: 'tokens=3', model: 'm' })
      return [await generation.text(), typeof generation.streamId]`)
    expect(text).toEqual([tokensOf(3), 'string'])
  })

  it('makes keys where the page is not a secure context', async () => {
    const keys = await inPage<string[]>(`
      Object.defineProperty(crypto, 'randomUUID', { value: undefined, configurable: true })
      await client.push('insecure', [1])
      await client.push('insecure', [2])
      return []`).then(() =>
      proxy.seen.filter(({ path }) => path.includes('/push')).map((seen) => seen.headers['idempotency-key']),
    )
    expect(keys.slice(-2)).toEqual([expect.stringMatching(uuid), expect.stringMatching(uuid)])
    expect(keys.at(-1)).not.toBe(keys.at(-2))
  })
})

const uuid = /^[\da-f]{8}-[\da-f]{4}-4[\da-f]{3}-[89ab][\da-f]{3}-[\da-f]{12}$/
