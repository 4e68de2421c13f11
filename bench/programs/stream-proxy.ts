/**
 * A Fastify that passes a model's stream on, and nothing else: what any front door costs at the least. `pipe` hands on the bytes
 * as they come; `number` looks at each block, as one has to that knows what it passes: JSON, and an id for each.
 */
import type { Readable } from 'node:stream'
import type { FastifyReply } from 'fastify'
import { Pool } from 'undici'
import { env } from './env.js'
import { bareApp, listen } from './handler-app.js'

const mode = env('MODE')
if (mode !== 'pipe' && mode !== 'number') throw new Error(`MODE is pipe or number, not ${mode}`)
const upstream = new Pool(env('UPSTREAM'), { connections: 10_000, pipelining: 1, headersTimeout: 0, bodyTimeout: 0 })
const headers = {
  'content-type': 'text/event-stream; charset=utf-8',
  'cache-control': 'no-cache, no-transform',
  'x-accel-buffering': 'no',
}

/** The blocks of what has come, each with a number; what is left of the last one waits for the rest. */
async function number(from: Readable, reply: FastifyReply): Promise<void> {
  const { raw } = reply
  let rest = ''
  let count = 0
  raw.once('close', () => from.destroy())
  for await (const came of from.setEncoding('utf8')) {
    const blocks = (rest + String(came)).split('\n\n')
    rest = blocks.pop() ?? ''
    let text = ''
    for (const block of blocks) {
      const data = block.slice('data: '.length)
      if (data !== '[DONE]' && !Array.isArray(Object(JSON.parse(data)).choices)) throw new Error('no chat completion')
      text += `id: ${++count}\ndata: ${data}\n\n`
    }
    if (text !== '' && !raw.write(text))
      await new Promise((resolve) => raw.once('drain', resolve).once('close', resolve))
  }
  raw.end()
}

const app = bareApp()
app.post('/v1/chat/completions', async (request, reply) => {
  const { body } = await upstream.request({
    method: 'POST',
    path: '/v1/chat/completions',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify(request.body),
  })
  request.raw.socket.setNoDelay(true)
  if (mode === 'pipe') return reply.headers(headers).send(body)
  reply.hijack()
  reply.raw.writeHead(200, headers)
  // A reader that leaves breaks the stream off: that is how every run ends.
  number(body, reply).catch(() => reply.raw.destroy())
  return reply
})

await listen(app, () => upstream.destroy())
