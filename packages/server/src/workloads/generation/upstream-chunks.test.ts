import { describe, expect, it } from 'vitest'
import type { UpstreamChunk } from './upstream.js'
import { ChunkReader, completionAsChunks, upstreamError, wholeCompletion } from './upstream-chunks.js'

const conceal = (text: string) => text.replaceAll('sk-secret', '***')
const head = { id: 'c-1', object: 'chat.completion.chunk', created: 1_700_000_000, model: 'm' }

function chunk(delta: unknown, more: Record<string, unknown> = {}, finish: string | null = null) {
  return JSON.stringify({ ...head, choices: [{ index: 0, delta, finish_reason: finish }], ...more })
}

const sse = (...texts: string[]) => Buffer.from(texts.map((text) => `data: ${text}\n\n`).join(''))

function reading(...texts: string[]) {
  const reader = new ChunkReader('op-1', conceal)
  const chunks: UpstreamChunk[] = []
  reader.read(sse(...texts), chunks)
  return { reader, chunks }
}

const thrown = (act: () => unknown): unknown => {
  try {
    act()
  } catch (fault) {
    return fault
  }
  throw new Error('nothing was thrown')
}

describe('chunks of a stream', () => {
  it('passes the text on as it came, with its content and finish reason', () => {
    const first = chunk({ content: 'Hi' })
    const last = chunk({}, { usage: null }, 'stop')
    expect(reading(first, last).chunks).toEqual([
      { text: first, content: 'Hi', finishReason: null },
      { text: last, content: '', finishReason: 'stop' },
    ])
  })

  it('keeps the role back until a token arrives', () => {
    const role = chunk({ role: 'assistant', content: '' })
    const { reader, chunks } = reading(role)
    expect([chunks, reader.hasToken]).toEqual([[], false])
    reader.read(sse(chunk({ content: 'x' })), chunks)
    expect([chunks.map(({ text }) => text), reader.hasToken]).toEqual([[role, chunk({ content: 'x' })], true])
  })

  it.each([
    ['a tool call', { role: 'assistant', content: null, tool_calls: [{ index: 0, function: { name: 'f' } }] }],
    ['reasoning', { reasoning_content: 'hm' }],
  ])('counts %s as a token, and leaves it as it is', (_, delta) => {
    const { reader, chunks } = reading(chunk(delta))
    expect([reader.hasToken, chunks[0]?.text]).toEqual([true, chunk(delta)])
  })

  it('gives chunks without anything in the end, if nothing else comes', () => {
    const role = chunk({ role: 'assistant', content: '' })
    expect(reading(role, '[DONE]').chunks.map(({ text }) => text)).toEqual([role])
  })

  it('leaves several choices untouched', () => {
    const two = JSON.stringify({
      ...head,
      choices: [1, 0].map((index) => ({ index, delta: { content: `c${index}` } })),
    })
    expect(reading(two).chunks).toEqual([{ text: two, content: 'c1', finishReason: null }])
  })

  it('passes a usage chunk without choices', () => {
    const usage = JSON.stringify({ ...head, choices: [], usage: { total_tokens: 3 } })
    expect(reading(chunk({ content: 'x' }), usage).chunks[1]).toEqual({ text: usage, content: '', finishReason: null })
  })

  it('makes id and time constant', () => {
    const { chunks } = reading(chunk({ content: 'a' }), chunk({ content: 'b' }, { id: 'other', created: 5 }))
    expect(chunks.map(({ text }) => text)).toEqual([chunk({ content: 'a' }), chunk({ content: 'b' })])
  })

  it('gives an id of ours where there is none', () => {
    const { chunks } = reading(chunk({ content: 'a' }, { id: '', created: 0 }), chunk({ content: 'b' }))
    const ids = chunks.map(({ text }) => JSON.parse(text))
    expect(ids.map(({ id }) => id)).toEqual(['chatcmpl-op-1', 'chatcmpl-op-1'])
    expect(ids[0].created).toBeGreaterThan(1_700_000_000)
    expect(ids[1].created).toBe(ids[0].created)
  })

  it('brings JSON over several lines onto one', () => {
    const pretty = JSON.stringify(JSON.parse(chunk({ content: 'a\nb' })), null, 2)
    const { chunks } = reading(pretty.replaceAll('\n', '\ndata: '))
    expect(chunks.map(({ text }) => text)).toEqual([chunk({ content: 'a\nb' })])
  })

  it('looks at nothing behind [DONE]', () => {
    const { reader, chunks } = reading(chunk({ content: 'a' }), '[DONE]', 'garbage')
    expect([reader.isDone, chunks.length]).toEqual([true, 1])
  })

  it('gives the chunks before an error object, then the error', () => {
    const reader = new ChunkReader('op-1', conceal)
    const chunks: UpstreamChunk[] = []
    const error = { message: 'died with sk-secret', type: 'server_error', param: null, code: 500, stack: 'at …' }
    expect(thrown(() => reader.read(sse(chunk({ content: 'a' }), JSON.stringify({ error })), chunks))).toMatchObject({
      code: 'upstream_error',
      retryable: true,
      error: { message: 'died with ***', type: 'server_error', param: null, code: '500' },
    })
    expect(chunks.map(({ content }) => content)).toEqual(['a'])
  })

  it('does not call an error retryable that blames the request', () => {
    const fault = thrown(() => reading(JSON.stringify({ error: { message: 'too long', code: 400 } })))
    expect(fault).toMatchObject({ code: 'upstream_error', retryable: false })
  })

  it('takes an event named error for one', () => {
    const reader = new ChunkReader('op-1', conceal)
    const fault = thrown(() => reader.read(Buffer.from('event: error\ndata: {"message":"gone"}\n\n'), []))
    expect(fault).toMatchObject({ code: 'upstream_error', error: { message: 'gone', type: 'upstream_error' } })
  })

  it('passes over named events that are no chunks', () => {
    const reader = new ChunkReader('op-1', conceal)
    const chunks: UpstreamChunk[] = []
    reader.read(Buffer.from('event: ping\ndata: {"type":"ping"}\n\n'), chunks)
    expect(chunks).toEqual([])
  })

  it.each(['{"id":oops', '"text"', '[]', '7', '{"id":"x"}'])('refuses %s', (text) => {
    expect(thrown(() => reading(text))).toMatchObject({ code: 'upstream_malformed', retryable: false })
  })
})

describe('the end of a stream', () => {
  it('is proper with a finish reason and no [DONE]', () => {
    const { reader, chunks } = reading(chunk({ content: 'a' }, {}, 'stop'))
    reader.end(chunks)
    expect(chunks).toHaveLength(1)
  })

  it.each([
    ['in the middle', sse(chunk({ content: 'a' }))],
    ['within a chunk', Buffer.concat([sse(chunk({ content: 'a' })), Buffer.from('data: {"id":"c-1","cho')])],
    ['before anything', Buffer.from('')],
  ])('is incomplete %s', (_, bytes) => {
    const reader = new ChunkReader('op-1', conceal)
    reader.read(bytes, [])
    expect(thrown(() => reader.end([]))).toMatchObject({ code: 'upstream_incomplete', retryable: true })
  })

  it('is incomplete with [DONE] and nothing else', () => {
    expect(thrown(() => reading('[DONE]'))).toMatchObject({ code: 'upstream_incomplete' })
  })
})

describe('a whole completion', () => {
  const message = { role: 'assistant', content: 'Hello', tool_calls: [{ id: 't', function: { name: 'f' } }] }
  const completion = {
    ...head,
    object: 'chat.completion',
    choices: [{ index: 0, message, finish_reason: 'stop' }],
    usage: { total_tokens: 9 },
  }

  it('is one chunk, on one line', () => {
    expect(wholeCompletion(JSON.stringify(completion, null, 2), conceal)).toEqual([
      { text: JSON.stringify(completion), content: 'Hello', finishReason: 'stop' },
    ])
  })

  it('is given as a stream where one was asked for', () => {
    const request = { operationId: 'op-1', usage: true }
    const [first, usage, ...rest] = completionAsChunks(JSON.stringify(completion), request, conceal)
    expect(rest).toEqual([])
    expect(first).toMatchObject({ content: 'Hello', finishReason: 'stop' })
    const delta = { ...message, tool_calls: [{ index: 0, id: 't', function: { name: 'f' } }] }
    expect(JSON.parse(first?.text ?? '')).toEqual({ ...head, choices: [{ index: 0, delta, finish_reason: 'stop' }] })
    expect(JSON.parse(usage?.text ?? '')).toEqual({ ...head, choices: [], usage: { total_tokens: 9 } })
  })

  it('may be an error all the same', () => {
    const fault = thrown(() => wholeCompletion('{"error":"model crashed"}', conceal))
    expect(fault).toMatchObject({ code: 'upstream_error', error: { message: 'model crashed' } })
  })
})

describe('an error of the upstream', () => {
  it('has its four members only, and bounded', () => {
    const error = { message: 'x'.repeat(9_999), type: 'a', param: 'b', code: 'c', secret: 'd' }
    const given = upstreamError({ error }, conceal)
    expect(given).toEqual({ message: 'x'.repeat(2_048), type: 'a', param: 'b', code: 'c' })
  })

  it.each([{ error: null }, {}, 'text', null])('is not seen in %j', (value) => {
    expect(upstreamError(value, conceal)).toBeNull()
  })
})
