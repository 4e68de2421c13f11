/** Pages in Chromium against a server without authentication: our own work, directly and behind nginx; others' do nothing. */
import { randomUUID } from 'node:crypto'
import { once } from 'node:events'
import { createServer, type Server } from 'node:http'
import type { AddressInfo } from 'node:net'
import type { Browser, Page } from 'playwright-core'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { findChromium, launchChromium } from '../../../spillway/test/setup/chromium.js'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { findNginx, type Nginx, startNginx } from '../../../spillway/test/setup/nginx.js'
import { endAll, get, post, type ServerProcess, startServer, until } from '../server-process.js'

const isMissing = 'missing' in findChromium() || 'missing' in (await findNginx())
/** Names that lead to this machine, as those of a proxy, and of a page that rebinds its name, do. */
const ownName = 'gate.test'
const foreignName = 'evil.test'
const docsMs = 120_000

let browser: Browser
let database: TestDatabase
let server: ServerProcess
let nginx: Nginx
let foreign: Server

beforeAll(async () => {
  if (isMissing) return
  browser = await launchChromium([`--host-resolver-rules=MAP ${ownName} 127.0.0.1,MAP ${foreignName} 127.0.0.1`])
  database = await freshDatabase()
  server = await startServer({ DATABASE_URL: database.url, SPILLWAY_ALLOWED_HOSTS: ownName })
  nginx = await startNginx({ servers: [server.origin] })
  foreign = createServer((_, response) => response.setHeader('content-type', 'text/html').end('<!doctype html>'))
  foreign.listen(0, '127.0.0.1')
  await once(foreign, 'listening')
})
afterAll(async () => {
  if (isMissing) return
  await browser.close()
  foreign.closeAllConnections()
  foreign.close()
  await nginx.stop()
  await endAll()
  await database.drop()
})

async function onPage<T>(url: string, look: (page: Page) => Promise<T>): Promise<T> {
  const context = await browser.newContext()
  try {
    const page = await context.newPage()
    await page.goto(url)
    return await look(page)
  } finally {
    await context.close()
  }
}

/** From within the page, as a script of its own would. */
function fetchStatus(page: Page, method: string, url: string, body?: unknown, mode: 'cors' | 'no-cors' = 'cors') {
  const headers = body === undefined || mode === 'no-cors' ? {} : { 'content-type': 'application/json' }
  const init = { method, mode, headers, ...(body !== undefined && { body: JSON.stringify(body) }) }
  return page.evaluate(
    `fetch(${JSON.stringify(url)}, ${JSON.stringify(init)}).then((answer) => answer.status, () => 'failed')`,
  )
}

const placeOf: Record<string, () => string> = {
  directly: () => server.origin,
  'by the name localhost': () => `http://localhost:${server.port}`,
  'behind nginx by another name': () => `http://${ownName}:${nginx.port}`,
}

describe.skipIf(isMissing)('pages of this server', () => {
  it.each(Object.keys(placeOf))('push, take and read %s', async (place) => {
    const origin = placeOf[place]?.() ?? ''
    const queue = randomUUID()
    await onPage(`${origin}/demo`, async (page) => {
      expect(await fetchStatus(page, 'POST', '/api/v1/push', { items: [{ queue, payload: 1 }] })).toBe(201)
      expect(await fetchStatus(page, 'GET', `/api/v1/pop/queue/${queue}?autoAck=true`)).toBe(200)
      expect(await fetchStatus(page, 'GET', '/api/v1/operations')).toBe(200)
    })
  })

  it('stream an answer on the demo page behind nginx', async () => {
    await onPage(`http://${ownName}:${nginx.port}/demo`, async (page) => {
      await until('the models are listed', async () => (await page.getByLabel('Model').inputValue()) !== '')
      await page.getByLabel('Question').fill('Say 5 words')
      await page.getByRole('button', { name: 'Stream', exact: true }).click()
      const pane = page.locator('.pane')
      await until('it is done', async () => (await pane.getAttribute('data-state')) === 'done')
    })
  })

  it(
    'try a route out on the documentation page',
    async () => {
      await onPage(`http://${ownName}:${nginx.port}/docs/`, async (page) => {
        // It draws all routes first, which takes a busy machine some time.
        page.setDefaultTimeout(docsMs)
        const route = page.locator('#operations-messages-post_api_v1_configure')
        await route.locator('button.opblock-summary-control').click()
        await route.getByRole('button', { name: 'Try it out' }).click()
        await route.locator('textarea.body-param__text').fill(JSON.stringify({ queue: randomUUID() }))
        const [answer] = await Promise.all([
          page.waitForResponse((response) => response.url().endsWith('/api/v1/configure')),
          route.getByRole('button', { name: 'Execute' }).click(),
        ])
        expect(answer.ok()).toBe(true)
      })
    },
    docsMs,
  )
})

describe.skipIf(isMissing)('pages of others', () => {
  it('neither push nor take, whichever way they try', async () => {
    const queue = randomUUID()
    await post(server, '/api/v1/push', { items: [{ queue, payload: 'mine' }] })
    const { port } = foreign.address() as AddressInfo
    for (const origin of [`http://${foreignName}:${port}`, `http://127.0.0.1:${port}`, `http://localhost:${port}`]) {
      await onPage(origin, async (page) => {
        const pop = `${server.origin}/api/v1/pop/queue/${queue}?autoAck=true`
        const push = `${server.origin}/api/v1/push`
        await fetchStatus(page, 'GET', pop, undefined, 'no-cors')
        await fetchStatus(page, 'GET', pop)
        await fetchStatus(page, 'POST', push, { items: [{ queue, payload: 'theirs' }] }, 'no-cors')
        await fetchStatus(page, 'POST', push, { items: [{ queue, payload: 'theirs' }] })
        await page.evaluate(
          `new Promise((resolve) => Object.assign(new Image(), { onload: resolve, onerror: resolve, src: ${JSON.stringify(pop)} }))`,
        )
        // A link that its user follows goes there by itself.
        const [answer] = await Promise.all([
          page.waitForResponse((response) => response.url() === pop),
          page.evaluate(`location.href = ${JSON.stringify(pop)}`),
        ])
        expect(answer.status()).toBe(403)
      })
    }
    const { body } = await get(server, `/api/v1/pop/queue/${queue}?batch=10`)
    expect((body.messages as { data: unknown }[]).map(({ data }) => data)).toEqual(['mine'])
  }, 30_000)

  it('that lead their own name to this server get nothing from it', async () => {
    const context = await browser.newContext()
    const page = await context.newPage()
    const answer = await page.goto(`http://${foreignName}:${server.port}/demo`)
    expect(answer?.status()).toBe(421)
    expect(await fetchStatus(page, 'POST', '/api/v1/admin/halt', { reason: 'rebound' })).toBe(421)
    expect(await fetchStatus(page, 'GET', '/metrics')).toBe(421)
    await context.close()
    expect((await get(server, '/api/v1/admin/halt')).body.halted).toBe(false)
  })
})
