/** The page under /demo, in Chromium: against real servers, and against a scripted one for what a real one does not do. */
import { randomUUID } from 'node:crypto'
import type { ServerResponse } from 'node:http'
import { pino } from 'pino'
import type { Browser, BrowserContext, Locator, Page } from 'playwright-core'
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { findChromium, launchChromium } from '../../../spillway/test/setup/chromium.js'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { buildApp } from '../../src/app.js'
import { createAuthenticator } from '../../src/auth/auth.js'
import { addDemoPage } from '../../src/demo/page.js'
import { endAll, finishes, get, post, type ServerProcess, startServer, until } from '../server-process.js'

const isMissing = 'missing' in findChromium()
const bytesMax = 20_000
/** Slow enough for a test to do something in the middle. */
const tokensPerSecond = 40
const question = 'Say 120 words'
/** Six of these, two at a time, on a busy machine. */
const sixMsMax = 45_000

let browser: Browser
let context: BrowserContext | undefined
const closers: (() => Promise<unknown>)[] = []
/** Of all streams that a page has begun. */
const begun = new Set<string>()

beforeAll(async () => {
  if (!isMissing) browser = await launchChromium()
})
afterEach(async () => {
  await context?.close()
  await Promise.all(closers.splice(0).map((close) => close()))
})
afterAll(async () => {
  await browser?.close()
  await endAll()
})

interface Opened {
  page: Page
  /** What the browser complained of: a blocked script, a failed load. */
  complaints: string[]
  requests: string[]
}

async function open(origin: string, options: { javaScriptEnabled?: boolean } = {}): Promise<Opened> {
  // Every page is another user's, so that the streams of one test take no places of the next.
  context = await browser.newContext({ ...options, extraHTTPHeaders: { 'x-user-id': randomUUID() } })
  const page = await context.newPage()
  const complaints: string[] = []
  const requests: string[] = []
  page.on('console', (message) => {
    if (message.type() === 'error') complaints.push(message.text())
  })
  page.on('pageerror', (error) => complaints.push(String(error)))
  page.on('request', (request) => requests.push(request.url()))
  page.on('response', (response) => begun.add(response.headers()['x-stream-id'] ?? ''))
  await page.goto(`${origin}/demo`)
  return { page, complaints, requests }
}

/** Fills in the form once the models are known, and presses the button. */
async function ask(page: Page, question: string, button = 'Stream'): Promise<Locator> {
  await until('the models are listed', async () => (await page.getByLabel('Model').inputValue()) !== '')
  await page.getByLabel('Question').fill(question)
  await page.getByRole('button', { name: button, exact: true }).click()
  return page.locator('.pane')
}

const answerOf = (pane: Locator) => pane.getByRole('region', { name: 'Answer' }).textContent()
const statusOf = (pane: Locator) => pane.getByRole('status').textContent()
const shownIn = (pane: Locator, name: string) => pane.locator(`[data-part=${name}]`).textContent()
const press = (pane: Locator, name: string) => pane.getByRole('button', { name }).click()

async function reaches(pane: Locator, state: string, ms?: number): Promise<void> {
  const isThere = async () => (await pane.getAttribute('data-state')) === state
  await until(`the pane is ${state}`, isThere, ms).catch(async (fault: unknown) => {
    throw new Error(`It says: ${await statusOf(pane)}`, { cause: fault })
  })
}

async function hasTokens(pane: Locator, count: number): Promise<void> {
  await until(`${count} tokens have come`, async () => Number(await shownIn(pane, 'count')) >= count)
}

interface Call {
  method: string
  path: string
  lastEventId: string | undefined
  authorization: string | undefined
}

type Handle = (call: Call, response: ServerResponse) => void

const streamId = '0197a000-0000-7000-8000-000000000001'

function event(name: string, body: object, id?: number): string {
  return `${id === undefined ? '' : `id: ${id}\n`}event: ${name}\ndata: ${JSON.stringify(body)}\n\n`
}
const chunk = (index: number): string =>
  event('chunk', { content: `<${index}>`, chunk_index: index, finish_reason: null }, index + 1)
const complete = (count: number): string =>
  `${event('complete', { thread_id: 't', chunk_count: count, total_length: 3 * count, duration_ms: 5 }, count + 1)}data: [DONE]\n\n`
const problem = (response: ServerResponse, status: number, headers: Record<string, string>, detail: string): unknown =>
  response
    .writeHead(status, { 'content-type': 'application/problem+json', ...headers })
    .end(JSON.stringify({ status, detail, title: 'Scripted', code: 'scripted' }))

function streams(response: ServerResponse): ServerResponse {
  return response.writeHead(200, {
    'content-type': 'text/event-stream; charset=utf-8',
    'x-stream-id': streamId,
    'x-resilience-layer': '1-Direct',
  })
}

/** The page itself, over an API with scripted answers. */
async function scripted(handle: Handle): Promise<{ origin: string; calls: Call[] }> {
  const log = pino({ level: 'silent' })
  const { app } = buildApp({
    log,
    authenticator: createAuthenticator({ onFault: (err) => log.error({ err }) }),
    bodyLimitBytes: 1_048_576,
    requestTimeoutMs: 30_000,
    headersTimeoutMs: 10_000,
    connectionsMax: 1_000,
    corsOrigins: [],
  })
  addDemoPage(app)
  const calls: Call[] = []
  for (const url of ['/v1/models', '/api/v1/stream', '/api/v1/streams/*']) {
    app.route({
      method: ['GET', 'POST'],
      url,
      handler: (request, reply) => {
        reply.hijack()
        const { 'last-event-id': lastEventId, authorization } = request.headers
        const call = { method: request.method, path: request.url, lastEventId: lastEventId?.toString(), authorization }
        calls.push(call)
        handle(call, reply.raw)
      },
    })
  }
  const origin = await app.listen({ host: '127.0.0.1', port: 0 })
  closers.push(async () => {
    app.server.closeAllConnections()
    await app.close()
  })
  return { origin, calls }
}

const models = (response: ServerResponse): unknown =>
  response.writeHead(200, { 'content-type': 'application/json' }).end('{"object":"list","data":[{"id":"demo"}]}')

/** Whatever is not about models: the first request, then those that resume. */
function streaming(first: (response: ServerResponse) => void, resumed: (response: ServerResponse) => void = first) {
  return scripted(({ path }, response) => {
    if (path === '/v1/models') models(response)
    else if (path === '/api/v1/stream') first(streams(response))
    else resumed(streams(response))
  })
}

/** An answer that is cut when the test says so: a browser throws away what it has not yet handed over when it hears of the end. */
function breaking(text: string) {
  let cut = (): void => undefined
  return {
    start: (response: ServerResponse): void => {
      response.write(text)
      cut = () => void response.destroy()
    },
    cut: () => cut(),
  }
}

describe.skipIf(isMissing)('the page itself', () => {
  it('is small, complete, and loads nothing but the API', async () => {
    const { origin } = await streaming((response) => response.end(chunk(0) + complete(1)))
    const { page, complaints, requests } = await open(origin)
    await reaches(await ask(page, 'Hello'), 'done')
    expect(complaints).toEqual([])
    expect(requests).toEqual([`${origin}/demo`, `${origin}/v1/models`, `${origin}/api/v1/stream`])
    expect((await get({ origin }, '/demo')).text.length).toBeLessThan(bytesMax)
  })

  it('allows no other script or style than its own', async () => {
    const { origin } = await streaming(() => undefined)
    const policy = (await get({ origin }, '/demo')).headers.get('content-security-policy')
    expect(policy).toMatch(
      /^default-src 'none'; script-src 'sha256-[\w+/=]+'; style-src 'sha256-[\w+/=]+'; connect-src/,
    )
    const { page } = await open(origin)
    await expect(page.addScriptTag({ content: 'document.title = 1' })).rejects.toThrow('Content Security Policy')
  })

  it('has a sentence and a command where JavaScript is off', async () => {
    const { origin } = await streaming(() => undefined)
    const { page } = await open(origin, { javaScriptEnabled: false })
    expect(await page.locator('noscript p').isVisible()).toBe(true)
    expect(await page.locator('pre').textContent()).toContain(`curl -N ${origin}/api/v1/stream`)
    expect(await page.getByRole('button', { name: 'Stream' }).isVisible()).toBe(false)
  })

  it('can be worked with the keyboard alone', async () => {
    const { origin } = await streaming((response) => response.write(chunk(0)))
    const { page } = await open(origin)
    const pane = page.locator('.pane')
    await until('the models are listed', async () => (await page.getByLabel('Model').inputValue()) !== '')
    await page.getByLabel('Question').press('Enter')
    await hasTokens(pane, 1)
    await pane.getByRole('button', { name: 'Drop' }).press('Enter')
    expect(await statusOf(pane)).toContain('Dropped after event 1')
    // The focus has gone on to Resume.
    await page.keyboard.press('Enter')
    await reaches(pane, 'streaming')
  })
})

describe.skipIf(isMissing)('a connection that breaks', () => {
  it('is resumed after the last complete event', async () => {
    const half = chunk(2).slice(0, -9)
    const broken = breaking(chunk(0) + chunk(1) + half)
    const { origin, calls } = await streaming(broken.start, (response) =>
      response.end(chunk(2) + chunk(3) + complete(4)),
    )
    const pane = await ask((await open(origin)).page, 'Hello')
    await hasTokens(pane, 2)
    broken.cut()
    await reaches(pane, 'done')
    expect(await answerOf(pane)).toBe('<0><1><2><3>')
    expect(await shownIn(pane, 'order')).toBe('no gap, no repeat')
    expect(calls.at(-1)).toMatchObject({ method: 'GET', path: `/api/v1/streams/${streamId}`, lastEventId: '2' })
  })

  it('is resumed when it ended without an end of the stream', async () => {
    const { origin } = await streaming(
      (response) => response.end(chunk(0)),
      (response) => response.end(chunk(1) + complete(2)),
    )
    const pane = await ask((await open(origin)).page, 'Hello')
    await reaches(pane, 'done')
    expect(await answerOf(pane)).toBe('<0><1>')
  })

  it('is resumed when an error ended the connection and not the stream', async () => {
    const draining = event('error', { message: 'Going down.', code: 'draining', retryable: true })
    const { origin } = await streaming(
      (response) => response.end(`${chunk(0)}${draining}data: [DONE]\n\n`),
      (response) => response.end(chunk(1) + complete(2)),
    )
    const pane = await ask((await open(origin)).page, 'Hello')
    await reaches(pane, 'done')
    expect(await answerOf(pane)).toBe('<0><1>')
  })

  it('shows that a chunk came twice', async () => {
    const broken = breaking(chunk(0) + chunk(1))
    const { origin } = await streaming(broken.start, (response) => response.end(chunk(1) + chunk(2) + complete(3)))
    const pane = await ask((await open(origin)).page, 'Hello')
    await hasTokens(pane, 2)
    broken.cut()
    await reaches(pane, 'done')
    expect(await shownIn(pane, 'order')).toBe('chunk 1 came twice')
  })

  it('shows that a chunk is missing', async () => {
    const { origin } = await streaming((response) => response.end(chunk(0) + chunk(2) + complete(3)))
    const pane = await ask((await open(origin)).page, 'Hello')
    await reaches(pane, 'done')
    expect(await shownIn(pane, 'order')).toBe('chunk 1 is missing')
  })

  it('shows that the last chunks are missing', async () => {
    const { origin } = await streaming((response) => response.end(chunk(0) + complete(2)))
    const pane = await ask((await open(origin)).page, 'Hello')
    await reaches(pane, 'done')
    expect(await shownIn(pane, 'order')).toBe('2 chunks were sent, 1 came')
  })
})

describe.skipIf(isMissing)('a refusal', () => {
  it('is shown with its Retry-After', async () => {
    const { origin } = await scripted(({ path }, response) =>
      path === '/v1/models' ? models(response) : problem(response, 503, { 'retry-after': '7' }, 'All is full.'),
    )
    const pane = await ask((await open(origin)).page, 'Hello')
    await reaches(pane, 'failed')
    expect(await statusOf(pane)).toBe('Failed 503: All is full. Retry after 7 s.')
  })

  it('in the stream is shown with its reason', async () => {
    const { origin } = await streaming((response) =>
      response.end(chunk(0) + event('error', { message: 'It broke.', code: 'upstream_error', retryable: false }, 2)),
    )
    const pane = await ask((await open(origin)).page, 'Hello')
    await reaches(pane, 'failed')
    expect(await statusOf(pane)).toBe('Failed It broke. (upstream_error)')
  })

  it('for want of a key asks for one, and sends it', async () => {
    const { origin } = await scripted(({ path, authorization }, response) => {
      if (authorization !== 'Bearer open-sesame') problem(response, 401, {}, 'A key is missing.')
      else if (path === '/v1/models') models(response)
      else streams(response).end(chunk(0) + complete(1))
    })
    const { page } = await open(origin)
    await page.getByLabel('API key').fill('open-sesame')
    await page.getByLabel('API key').press('Tab')
    await reaches(await ask(page, 'Hello'), 'done')
  })

  it('of a silent server is shown', async () => {
    const { origin } = await scripted(({ path }, response) =>
      path === '/v1/models' ? models(response) : response.destroy(),
    )
    const pane = await ask((await open(origin)).page, 'Hello')
    await reaches(pane, 'failed')
    expect(await statusOf(pane)).toContain('The server did not answer')
  })
})

describe.skipIf(isMissing)('on a real server', () => {
  let database: TestDatabase
  let server: ServerProcess

  beforeAll(async () => {
    database = await freshDatabase()
    server = await startServer({
      DATABASE_URL: database.url,
      CONNECTION_POOL_MAX_PER_USER: '2',
      GENERATION_CONCURRENCY: '2',
      GENERATION_DEMO_TOKENS_PER_SECOND: String(tokensPerSecond),
    })
  })
  afterEach(async () => {
    // Left alone, they would go on for a while, in the few slots that the next test needs.
    await Promise.all([...begun].map((id) => post(server, `/api/v1/streams/${id}/cancel`)))
    begun.clear()
  })
  afterAll(async () => {
    await server?.stop()
    await database?.drop()
  })

  /** What the same question brings to somebody who reads it without a break. */
  async function undisturbed(): Promise<string> {
    const { text } = await post(server, '/api/v1/stream', { query: question, model: 'demo' }, { 'x-user-id': 'steady' })
    const chunks = text.split('\n\n').filter((block) => block.includes('event: chunk'))
    return chunks.map((block) => JSON.parse(block.slice(block.indexOf('data: ') + 6)).content).join('')
  }

  /** Two run and four wait: the first that runs, once it has a token, and the last that waits. */
  async function six(page: Page, query: string): Promise<{ direct: Locator; queued: Locator }> {
    const panes = await ask(page, query, 'Start 6 at once')
    const layers = panes.locator('[data-part=layer]')
    await until('four wait', async () => (await page.locator('.pane[data-state=queued]').count()) === 4)
    const shown = await layers.allTextContents()
    const direct = panes.nth(shown.indexOf('1-Direct'))
    await hasTokens(direct, 1)
    return { direct, queued: panes.nth(shown.lastIndexOf('3-Queue-Failover')) }
  }

  it('streams to the end', async () => {
    const pane = await ask((await open(server.origin)).page, question)
    await reaches(pane, 'done')
    expect(await statusOf(pane)).toMatch(/^Done \d+ chunks in \d+\.\d s\.$/)
    expect(await shownIn(pane, 'layer')).toBe('1-Direct')
    expect(await shownIn(pane, 'count')).toBe('120')
    expect(await shownIn(pane, 'order')).toBe('no gap, no repeat')
    expect(await shownIn(pane, 'first')).toMatch(/^\d+\.\d\d s$/)
    // What comes late comes together: never faster than it is made, but for the first.
    const speed = Number(/^(\d+\.\d) tokens\/s$/.exec((await shownIn(pane, 'speed')) ?? '')?.[1])
    expect(speed).toBeGreaterThan(tokensPerSecond / 4)
    expect(speed).toBeLessThan(tokensPerSecond * 1.5)
  })

  it('shows every token once after a drop and a resume', async () => {
    const whole = undisturbed()
    const pane = await ask((await open(server.origin)).page, question)
    await hasTokens(pane, 20)
    await press(pane, 'Drop the connection')
    const event = Number(/^Dropped after event (\d+)\./.exec((await statusOf(pane)) ?? '')?.[1])
    const before = await answerOf(pane)
    expect(event).toBeGreaterThanOrEqual(20)
    expect(before).not.toBe(await whole)
    await press(pane, 'Resume')
    await reaches(pane, 'done')
    expect(await answerOf(pane)).toBe(await whole)
    expect(await shownIn(pane, 'count')).toBe('120')
    expect(await shownIn(pane, 'order')).toBe('no gap, no repeat')
  })

  it('shows the positions of waiting ones, and all end', async () => {
    const panes = await ask((await open(server.origin)).page, question, 'Start 6 at once')
    const waits = panes.getByRole('status').filter({ hasText: /^Queued position \d+.*; about \d+ s to wait\.$/ })
    await until('four wait with a place', async () => (await waits.count()) === 4)
    for (const pane of await panes.all()) await reaches(pane, 'done', sixMsMax)
    const layers = await panes.locator('[data-part=layer]').allTextContents()
    expect(layers.toSorted()).toEqual([...Array(2).fill('1-Direct'), ...Array(4).fill('3-Queue-Failover')])
    expect(new Set(await panes.getByRole('region').allTextContents())).toEqual(new Set([await undisturbed()]))
  }, 60_000)

  it('resumes a stream that was dropped while it waited', async () => {
    const { queued } = await six((await open(server.origin)).page, question)
    await press(queued, 'Drop the connection')
    expect(await statusOf(queued)).toContain('Dropped after event 0')
    await press(queued, 'Resume')
    await reaches(queued, 'done', sixMsMax)
    expect(await shownIn(queued, 'order')).toBe('no gap, no repeat')
  }, 60_000)

  it('cancels one that runs and one that waits while six take all connections of the browser', async () => {
    const { direct, queued } = await six((await open(server.origin)).page, 'Say 2,000 words')
    for (const pane of [direct, queued]) await press(pane, 'Cancel')
    for (const pane of [direct, queued]) await reaches(pane, 'cancelled')
    expect(Number(await shownIn(direct, 'count'))).toBeGreaterThan(0)
    expect(await shownIn(queued, 'count')).toBe('')
  })

  it('stops the running stream when another question is asked', async () => {
    const { page } = await open(server.origin)
    const pane = await ask(page, 'Say 2,000 words')
    await hasTokens(pane, 1)
    const id = (await shownIn(pane, 'id')) ?? ''
    await reaches(await ask(page, 'Say 3 words'), 'done')
    expect(await finishes(server, id)).toMatchObject({ status: 'cancelled' })
  })

  it('shows why a model is refused', async () => {
    const { page } = await open(server.origin)
    await until('the models are listed', async () => (await page.getByLabel('Model').inputValue()) === 'demo')
    await page.getByLabel('Model').fill('none-such')
    const pane = await ask(page, question)
    await reaches(pane, 'failed')
    expect(await statusOf(pane)).toContain('Failed 404: The model `none-such` does not exist')
  })
})
