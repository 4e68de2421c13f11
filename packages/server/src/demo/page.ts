/**
 * The page under /demo: streams in a browser, with a connection that can be dropped and resumed by hand.
 *
 * Each stream is one pane:
 *
 *   connecting ──► queued ──► streaming ──► done | cancelled | failed
 *                    │            │
 *                    └────────────┴─ dropped by hand ──► Resume ──► queued | streaming
 *                                  └ lost ──► resumed by itself after a while, a few times
 *
 * Style and script are inline, and the policy allows these two by their hashes: the page loads nothing except the API.
 */
import { createHash } from 'node:crypto'
import type { App } from '../app.js'
import { originOf } from '../landing.js'

const style = `
:root{--bg:#f5f6f8;--panel:#fff;--line:#c9cfd8;--text:#1a1f28;--muted:#535e6e;--accent:#0b57c4;--on-accent:#fff;--ok:#176b3a;--warn:#855000;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--bg:#12151a;--panel:#1b2028;--line:#3a4350;--text:#e6e9ee;--muted:#a8b2c0;--accent:#8ab8ff;--on-accent:#0c1b33;--ok:#7ddc9f;--warn:#f2c16b;--bad:#ff9d94}}
*{box-sizing:border-box}[hidden]{display:none!important}
body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:0 auto;padding:1.5rem 1rem 3rem;background:var(--bg);color:var(--text)}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 .5rem}h2{font-size:1rem;margin:0}
.shell{margin-top:1.5rem}a{color:var(--accent)}
.lead{max-width:46rem;margin:0 0 1.25rem}
form{display:grid;gap:.75rem 1rem;grid-template-columns:1fr 12rem;align-items:end;background:var(--panel);border:1px solid var(--line);border-radius:.5rem;padding:1rem}
label{display:grid;gap:.25rem;font-weight:600}
input,button{font:inherit;color:inherit;min-height:2.75rem;border-radius:.375rem;border:1px solid var(--muted);padding:.5rem .75rem;min-width:0}
input{width:100%;background:var(--bg);font-weight:400}
button{background:var(--panel);cursor:pointer}
button.main{background:var(--accent);border-color:var(--accent);color:var(--on-accent);font-weight:600}button:hover:enabled{border-color:var(--text)}
button:disabled{opacity:.45;cursor:default}
:focus-visible{outline:3px solid var(--accent);outline-offset:2px}
.wide{grid-column:1/-1}.row{display:flex;flex-wrap:wrap;gap:.5rem}
#notice{margin:.75rem 0 0;color:var(--bad)}#notice:empty{margin:0}
.pane button{font-size:.875rem;padding:.4rem .5rem;min-height:2.5rem}
#panes{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));margin:1rem 0}
.pane{display:flex;flex-direction:column;gap:.6rem;min-width:0;background:var(--panel);border:1px solid var(--line);border-radius:.5rem;padding:1rem}
.status{margin:0;min-height:3em}.status strong{color:var(--accent)}
[data-state=queued] strong,[data-state=dropped] strong,[data-state=lost] strong,[data-state=cancelled] strong{color:var(--warn)}
[data-state=done] strong,.good{color:var(--ok)}
[data-state=failed] strong,.bad{color:var(--bad);font-weight:600}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(9rem,45%),1fr));gap:.4rem 1rem;margin:0;font-variant-numeric:tabular-nums}
dl div{min-width:0}dt{font-size:.8125rem;color:var(--muted)}
dd{margin:0;overflow-wrap:anywhere}dd:empty::before{content:'–';color:var(--muted)}
dl .wide dd{font-family:ui-monospace,monospace;font-size:.8125rem}
.answer{height:13rem;overflow:auto;white-space:pre-wrap;overflow-wrap:anywhere;background:var(--bg);border:1px solid var(--line);border-radius:.375rem;padding:.6rem .75rem}
pre{font-size:.875rem;padding:1rem;border-radius:.375rem;background:var(--panel);border:1px solid var(--line);white-space:pre-wrap;overflow-wrap:anywhere}
@media (max-width:40rem){form{grid-template-columns:1fr}.row button{flex:1 1 auto}.pane .row{gap:.35rem}.pane button{font-size:.8125rem}}
`

const script = String.raw`
'use strict'
const byId = (id) => document.getElementById(id)
const form = byId('ask')
const retry = { firstMs: 500, longestMs: 8000, triesMax: 8 }
const reading = ['queued', 'streaming', 'resuming']
const over = ['done', 'cancelled', 'failed']
let panes = []

function call(path, init = {}) {
  const key = byId('key').value.trim()
  return fetch(path, { ...init, headers: { ...init.headers, ...(key && { authorization: 'Bearer ' + key }) } })
}

/** An answer that is no stream, in words: of a problem document, or of OpenAI's error object. */
async function refusal(answer) {
  if (answer.status === 401) byId('key-field').hidden = false
  const text = await answer.text()
  let said
  try {
    said = JSON.parse(text)
  } catch {
    said = { detail: text.slice(0, 200) }
  }
  const faults = (said.errors ?? []).map(({ path, message }) => ' (' + path + ' ' + message + ')')
  const seconds = Number(answer.headers.get('retry-after'))
  return {
    text: answer.status + ': ' + (said.detail || said.error?.message || answer.statusText) + faults.join(''),
    mayPass: answer.status === 429 || answer.status >= 500,
    seconds: seconds > 0 ? seconds : null,
  }
}

/** Reads events from a body until it ends. A block that was cut off is no event. */
async function readEvents(body, take) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ''
  let block = {}
  for (;;) {
    const { done, value } = await reader.read()
    if (done) return
    const lines = (rest + value).split('\n')
    rest = lines.pop()
    for (const line of lines) {
      if (line === '') {
        if (block.data !== undefined && take(block) === 'stop') return
        block = {}
      } else if (line[0] !== ':') {
        const [, name, value] = /^([^:]*):? ?(.*)$/.exec(line)
        block[name] = value
      }
    }
  }
}

class Pane {
  id = null
  last = 0
  chunks = 0
  tokens = 0
  tries = 0
  resumes = 0
  fault = null

  constructor(title, request) {
    this.request = request
    this.node = byId('pane').content.firstElementChild.cloneNode(true)
    const named = [...this.node.querySelectorAll('[data-part]')].map((node) => [node.dataset.part, node])
    this.parts = Object.fromEntries(named)
    this.parts.title.textContent = title
    this.text = this.parts.answer.appendChild(new Text())
    const { drop, resume, cancel } = this.parts
    // The button that was pressed is disabled now: move the keyboard focus to the next button.
    drop.onclick = () => (this.drop(), resume.focus())
    resume.onclick = () => ((this.tries = 0), this.resume(), drop.focus())
    cancel.onclick = () => (this.cancel(), this.parts.answer.focus())
  }

  become(state, detail = '') {
    this.state = state
    this.node.dataset.state = state
    this.parts.state.textContent = state === 'lost' ? 'Connection lost' : state[0].toUpperCase() + state.slice(1)
    this.parts.detail.textContent = detail
    // Its last position is not shown once it has ended.
    if (over.includes(state) && this.tokens === 0) this.parts.queue.textContent = ''
    this.parts.drop.disabled = !this.id || !reading.includes(state)
    this.parts.resume.disabled = state !== 'dropped' && state !== 'lost'
    this.parts.cancel.disabled = !this.id || over.includes(state) || state === 'cancelling'
  }

  start() {
    this.startedAt = performance.now()
    this.become('connecting')
    const headers = { 'content-type': 'application/json' }
    return this.connect('/api/v1/stream', { method: 'POST', headers, body: JSON.stringify(this.request) })
  }

  resume() {
    this.resumes++
    this.become('resuming', 'after event ' + this.last)
    return this.connect('/api/v1/streams/' + this.id, { headers: { 'last-event-id': String(this.last) } })
  }

  drop() {
    this.leave()
    this.become('dropped', 'after event ' + this.last + '. The server goes on for a while.')
  }

  leave() {
    clearTimeout(this.timer)
    this.control?.abort()
  }

  async connect(path, init) {
    this.leave()
    const { signal } = (this.control = new AbortController())
    try {
      const answer = await call(path, { ...init, signal })
      if (answer.status === 204) return this.become('done', 'nothing was left to send.')
      if (!answer.ok) return this.refused(await refusal(answer))
      if (this.id === null) this.opened(answer.headers)
      else this.become('resuming', 'connected; waiting for what follows event ' + this.last + '.')
      await readEvents(answer.body, (event) => (signal.aborted ? 'stop' : this.take(event)))
      if (!signal.aborted && reading.includes(this.state)) this.lost('The connection ended')
    } catch (fault) {
      // Aborted: dropped, cancelled or replaced, each of which has said so already.
      if (!signal.aborted) this.lost(fault.message)
    }
  }

  opened(headers) {
    this.id = headers.get('x-stream-id')
    this.parts.id.textContent = this.id
    this.parts.layer.textContent = headers.get('x-resilience-layer')
    this.become('streaming', 'waiting for the first token.')
  }

  refused({ text, mayPass, seconds }) {
    if (this.id !== null && mayPass) return this.lost(text, seconds)
    this.become('failed', text + (seconds === null ? '' : ' Retry after ' + seconds + ' s.'))
  }

  lost(why, seconds = null) {
    if (this.id === null) return this.become('failed', 'The server did not answer (' + why + ').')
    const after = 'after event ' + this.last + ' (' + why + '). '
    if (this.tries >= retry.triesMax) return this.become('dropped', 'lost ' + after + 'Gave up; Resume tries again.')
    const ms = seconds === null ? Math.min(retry.longestMs, retry.firstMs * 2 ** this.tries) : seconds * 1000
    this.tries++
    this.become('lost', after + 'Resuming in ' + ms / 1000 + ' s.')
    this.timer = setTimeout(() => this.resume(), ms)
  }

  /**
   * A POST would wait behind six open streams, which is all that a browser opens to one host. So ours is closed first, and
   * how it ended is then read from the log.
   */
  async cancel() {
    this.leave()
    this.become('cancelling')
    try {
      const answer = await call('/api/v1/streams/' + this.id + '/cancel', { method: 'POST' })
      // 409: it has ended meanwhile.
      if (!answer.ok && answer.status !== 409) return this.refused(await refusal(answer))
    } catch (fault) {
      return this.become('dropped', 'The server could not be reached (' + fault.message + ').')
    }
    await this.resume()
  }

  take({ event, id, data }) {
    if (event === undefined) return
    const body = JSON.parse(data)
    if (id !== undefined) this.last = Number(id)
    if (event === 'queued') this.waiting(body)
    else if (event === 'chunk') this.chunk(body)
    else if (event === 'complete') this.complete(body)
    else if (event === 'error') this.failed(body, id !== undefined)
  }

  waiting({ position, eta_seconds }) {
    const place = 'position ' + position + (position === 0 ? ', the next' : '')
    this.parts.queue.textContent = place
    this.become('queued', place + '; about ' + eta_seconds + ' s to wait.')
  }

  chunk({ content, chunk_index }) {
    const now = performance.now()
    const isTwice = chunk_index < this.chunks
    this.check(chunk_index === this.chunks, 'chunk ' + (isTwice ? chunk_index + ' came twice' : this.chunks + ' is missing'))
    this.chunks = Math.max(this.chunks, chunk_index + 1)
    this.tries = 0
    const how = this.resumes > 0 ? 'resumed with event ' + this.last + '.' : ''
    if (this.state !== 'streaming') this.become('streaming', how)
    if (content !== '') this.token(content, now)
  }

  check(holds, fault) {
    if (!holds) this.fault ??= fault
    this.parts.order.textContent = this.fault ?? 'no gap, no repeat'
    this.parts.order.className = this.fault === null ? 'good' : 'bad'
  }

  token(content, now) {
    const { answer, count, speed, first, queue } = this.parts
    if (this.tokens++ === 0) {
      this.firstAt = now
      const seconds = ((now - this.startedAt) / 1000).toFixed(2) + ' s'
      first.textContent = seconds
      queue.textContent = queue.textContent === '' ? 'not queued' : 'waited ' + seconds
      if (this.resumes === 0) this.become('streaming')
    }
    const isAtEnd = answer.scrollTop + answer.clientHeight >= answer.scrollHeight - 8
    this.text.appendData(content)
    if (isAtEnd) answer.scrollTop = answer.scrollHeight
    count.textContent = this.tokens
    const perSecond = ((this.tokens - 1) * 1000) / (now - this.firstAt)
    if (perSecond > 0 && perSecond < Infinity) speed.textContent = perSecond.toFixed(1) + ' tokens/s'
  }

  complete({ chunk_count, duration_ms }) {
    this.check(chunk_count === this.chunks, chunk_count + ' chunks were sent, ' + this.chunks + ' came')
    const times = this.resumes === 0 ? '' : ', resumed ' + (this.resumes === 1 ? 'once' : this.resumes + ' times')
    this.become('done', chunk_count + ' chunks in ' + (duration_ms / 1000).toFixed(1) + ' s' + times + '.')
  }

  /** One without a number is not in the log: it ended this connection, and the stream perhaps goes on. */
  failed({ message, code, retryable }, isLogged) {
    if (code === 'generation_cancelled') return this.become('cancelled', message)
    if (retryable && !isLogged) return this.lost(message)
    this.become('failed', message + ' (' + code + ')' + (retryable ? ' It may be tried again.' : ''))
  }
}

/** What still runs is stopped, so that it holds no place of those that come. */
async function stopAll() {
  const running = panes.filter(({ id, state }) => id !== null && !over.includes(state))
  for (const pane of panes) pane.leave()
  // Where this fails, the server stops them by itself when nobody has read them for a while.
  await Promise.allSettled(running.map(({ id }) => call('/api/v1/streams/' + id + '/cancel', { method: 'POST' })))
}

async function begin(count) {
  const isBusy = (busy) => [byId('one'), byId('six')].forEach((button) => (button.disabled = busy))
  isBusy(true)
  await stopAll()
  const request = { query: byId('query').value, model: byId('model').value }
  const titleOf = (i) => (count === 1 ? 'Stream' : 'Stream ' + (i + 1) + ' of ' + count)
  panes = Array.from({ length: count }, (_, i) => new Pane(titleOf(i), request))
  byId('panes').replaceChildren(...panes.map(({ node }) => node))
  for (const pane of panes) pane.start()
  isBusy(false)
}

async function listModels() {
  const notice = byId('notice')
  try {
    const answer = await call('/v1/models')
    if (!answer.ok) throw new Error((await refusal(answer)).text)
    const models = (await answer.json()).data.map(({ id }) => id)
    byId('models').replaceChildren(...models.map((model) => new Option(model, model)))
    if (byId('model').value === '') byId('model').value = models[0] ?? ''
    notice.textContent = ''
  } catch (fault) {
    notice.textContent = 'The models cannot be listed. ' + fault.message
  }
}

form.onsubmit = (event) => {
  event.preventDefault()
  begin(1)
}
byId('six').onclick = () => form.reportValidity() && begin(6)
byId('key').onchange = listModels
byId('app').hidden = false
listModels()
`

const pane = `<article class="pane" data-state="connecting">
<h2 data-part="title"></h2>
<p class="status" role="status"><strong data-part="state"></strong> <span data-part="detail"></span></p>
<div class="row">
<button type="button" data-part="drop">Drop the connection</button>
<button type="button" data-part="resume">Resume</button>
<button type="button" data-part="cancel">Cancel</button>
</div>
<dl>
<div><dt>Layer</dt><dd data-part="layer"></dd></div><div><dt>Queue</dt><dd data-part="queue"></dd></div>
<div><dt>Tokens</dt><dd data-part="count"></dd></div><div><dt>Speed</dt><dd data-part="speed"></dd></div>
<div><dt>First token after</dt><dd data-part="first"></dd></div><div><dt>Order</dt><dd data-part="order"></dd></div>
<div class="wide"><dt>Stream id</dt><dd data-part="id"></dd></div>
</dl>
<div class="answer" data-part="answer" role="region" aria-label="Answer" tabindex="0"></div>
</article>`

function page(host: string | undefined): string {
  const origin = originOf(host)
  return `<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Spillway: streaming</title>
<style>${style}</style>
<main>
<h1>Spillway streaming demo</h1>
<p class="lead">Every token is in a log before it is sent. Drop the connection in the middle: Resume goes on behind the last
event you have. Start six at once: those that find no place free are queued, not refused, and stream when their turn comes.</p>
<noscript><p class="lead">This page streams with JavaScript, which is off in this browser. The commands below do the same.</p></noscript>
<div id="app" hidden>
<form id="ask">
<label>Question<input id="query" name="query" required maxlength="100000" autocomplete="off" value="Tell me in 400 words what a spillway is for."></label>
<label>Model<input id="model" name="model" required maxlength="255" autocomplete="off" list="models"><datalist id="models"></datalist></label>
<label id="key-field" class="wide" hidden>API key<input id="key" type="password" autocomplete="off"></label>
<div class="row wide"><button id="one" class="main">Stream</button><button id="six" type="button">Start 6 at once</button></div>
</form>
<p id="notice" role="alert"></p>
<div id="panes"></div>
<template id="pane">${pane}</template></div>
<h2 class="shell">From a shell</h2>
<pre>curl -N ${origin}/api/v1/stream \\
  -H 'content-type: application/json' \\
  -d '{"query":"Hello","model":"demo"}'

curl -N ${origin}/api/v1/streams/STREAM_ID -H 'last-event-id: 42'</pre>
<p><a href="/">Spillway</a> · <a href="/docs">API</a> · <a href="/metrics">metrics</a></p>
</main>
<script>${script}</script>
</html>
`
}

const hashOf = (text: string): string => `'sha256-${createHash('sha256').update(text).digest('base64')}'`

const policy = [
  "default-src 'none'",
  `script-src ${hashOf(script)}`,
  `style-src ${hashOf(style)}`,
  "connect-src 'self'",
  "base-uri 'none'",
  "form-action 'none'",
  "frame-ancestors 'none'",
].join('; ')

export function addDemoPage(app: App): void {
  app.get('/demo', { config: { public: true } }, async (request, reply) => {
    reply.header('content-security-policy', policy)
    return reply.type('text/html; charset=utf-8').send(page(request.headers.host))
  })
}
