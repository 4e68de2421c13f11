import { describe, expect, it } from 'vitest'
import { DemoModel } from './demo-model.js'
import { carriedChat } from './request.js'
import type { UpstreamChunk } from './upstream.js'

const limits = { firstTokenMs: 10_000, idleMs: 10_000, totalMs: 60_000 }

function asked(content: unknown, more: Record<string, unknown> = {}) {
  const body = { model: 'demo', stream: true, messages: [{ role: 'user', content }], ...more }
  return {
    ...carriedChat(body),
    operationId: 'op-1',
    traceparent: '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01',
  }
}

const never = new AbortController().signal
const fast = { tokensPerSecond: 1_000_000 }

async function answered(request: ReturnType<typeof asked>, options = fast, signal = never, own = limits) {
  const chunks: UpstreamChunk[] = []
  for await (const batch of new DemoModel(options).generate(request, own, signal)) chunks.push(...batch)
  return chunks
}

const textOf = (chunks: readonly UpstreamChunk[]) => chunks.map(({ content }) => content).join('')
const tokensOf = (chunks: readonly UpstreamChunk[]) => chunks.filter(({ content }) => content !== '')

describe('what the demo model says', () => {
  it('names itself and the question, in 60 to 120 tokens', async () => {
    for (const question of [
      'Why is the sky blue?',
      'a',
      '',
      'one two three four five six seven eight nine ten',
      'x'.repeat(9_999),
    ]) {
      const chunks = await answered(asked(question))
      expect(textOf(chunks)).toContain('I am the demo model')
      expect(textOf(chunks)).toContain(question.split(' ').slice(0, 8).join(' ').slice(0, 20))
      expect(tokensOf(chunks).length).toBeGreaterThanOrEqual(60)
      expect(tokensOf(chunks).length).toBeLessThanOrEqual(120)
      expect(textOf(chunks)).toMatch(/[.]$/)
    }
  })

  it('says the same to the same question', async () => {
    expect(textOf(await answered(asked('Why?')))).toBe(textOf(await answered(asked('Why?'))))
  })

  it('says something else to another question', async () => {
    const texts = await Promise.all(
      ['a', 'b', 'c', 'd'].map(async (question) => textOf(await answered(asked(question)))),
    )
    const answers = new Set(texts.map((text) => text.slice(text.indexOf('”'))))
    expect(answers.size).toBeGreaterThan(1)
  })

  it('reads a question in parts', async () => {
    const parts = [
      { type: 'text', text: 'What is' },
      { type: 'text', text: 'this?' },
    ]
    expect(textOf(await answered(asked(parts)))).toContain('“What is this?”')
  })

  it.each([
    ['Write 500 words.', 500],
    ['in 1,500 tokens please', 1_500],
    ['a 7-word answer', 7],
    ['give me 999999 words', 100_000],
  ])('says as much as is asked for: %s', async (question, count) => {
    expect(tokensOf(await answered(asked(question)))).toHaveLength(count)
  })

  it.each(['max_tokens', 'max_completion_tokens'])('stops at %s', async (name) => {
    const chunks = await answered(asked('Write 500 words', { [name]: 5 }))
    expect(tokensOf(chunks)).toHaveLength(5)
    expect(chunks.at(-1)?.finishReason).toBe('length')
  })
})

describe('how the demo model says it', () => {
  it('sends chunks of one id and time: the role, the tokens, the end', async () => {
    const chunks = await answered(asked('Write 3 words'))
    const values = chunks.map(({ text }) => JSON.parse(text))
    expect(new Set(values.map(({ id, created }) => `${id} ${created}`)).size).toBe(1)
    expect(values.map(({ choices }) => choices[0])).toEqual([
      { index: 0, delta: { role: 'assistant', content: '' }, logprobs: null, finish_reason: null },
      ...['I', ' am', ' the'].map((content) => ({ index: 0, delta: { content }, logprobs: null, finish_reason: null })),
      { index: 0, delta: {}, logprobs: null, finish_reason: 'stop' },
    ])
  })

  it('sends usage last, where it is wanted', async () => {
    const chunks = await answered(asked('Write 3 words', { stream_options: { include_usage: true } }))
    expect(JSON.parse(chunks.at(-1)?.text ?? '')).toMatchObject({
      choices: [],
      usage: { prompt_tokens: 3, completion_tokens: 3, total_tokens: 6 },
    })
  })

  it('gives a complete answer without a stream', async () => {
    const streamed = await answered(asked('Why?'))
    const chunks = await answered(asked('Why?', { stream: false }))
    expect(chunks).toMatchObject([{ content: textOf(streamed), finishReason: 'stop' }])
    expect(JSON.parse(chunks[0]?.text ?? '')).toMatchObject({
      object: 'chat.completion',
      choices: [{ index: 0, message: { role: 'assistant', content: textOf(streamed) }, finish_reason: 'stop' }],
      usage: { prompt_tokens: 1, completion_tokens: tokensOf(streamed).length },
    })
  })

  it('keeps the pace', async () => {
    const startMs = performance.now()
    await answered(asked('Write 41 words'), { tokensPerSecond: 200 })
    const tookMs = performance.now() - startMs
    // The first at once, then forty at 5 ms; never early, and late timers catch up.
    expect(tookMs).toBeGreaterThanOrEqual(199)
    expect(tookMs).toBeLessThan(5_000)
  })

  it('catches up with the pace after a reader that was slow', async () => {
    const iterator = new DemoModel({ tokensPerSecond: 100 })
      .generate(asked('Write 1000 words'), limits, never)
      [Symbol.asyncIterator]()
    const first = await iterator.next()
    const slowUntilMs = performance.now() + 200
    while (performance.now() < slowUntilMs);
    const second = await iterator.next()
    expect([first.value.length, second.value.length >= 19]).toEqual([2, true])
    await iterator.return?.(undefined)
  })

  it('stops at once when it is not wanted any more', async () => {
    const controller = new AbortController()
    const reason = new Error('the client left')
    const slow = answered(asked('Why?'), { tokensPerSecond: 0.001 }, controller.signal)
    setImmediate(() => controller.abort(reason))
    await expect(slow).rejects.toBe(reason)
  })

  it('keeps to the total limit', async () => {
    const short = answered(asked('Why?'), { tokensPerSecond: 0.001 }, never, { ...limits, totalMs: 20 })
    await expect(short).rejects.toMatchObject({ code: 'upstream_timeout' })
  })

  it('ends running calls when it is closed', async () => {
    const model = new DemoModel({ tokensPerSecond: 0.001 })
    const iterator = model.generate(asked('Why?'), limits, never)[Symbol.asyncIterator]()
    await iterator.next()
    const next = expect(iterator.next()).rejects.toMatchObject({ code: 'upstream_unreachable' })
    await model.close()
    await next
  })
})

describe('which models there are', () => {
  it('lists one', async () => {
    const list = await new DemoModel(fast).models()
    expect(list).toMatchObject({ object: 'list', data: [{ id: 'demo', object: 'model', owned_by: 'spillway' }] })
  })

  it('knows no other', () => {
    const model = new DemoModel(fast)
    expect(model.unknownModel('demo')).toBeNull()
    expect(model.unknownModel('gpt-x')).toMatchObject({ code: 'model_not_found', param: 'model' })
  })
})
