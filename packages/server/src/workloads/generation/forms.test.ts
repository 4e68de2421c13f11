import { describe, expect, it } from 'vitest'
import { blocksOf, forms } from './forms.js'
import { failures } from './request.js'

describe('blocksOf, OpenAI', () => {
  it('numbers each chunk, and names no event', () => {
    const text = blocksOf('openai', { first: 7, chunks: ['{"a":1}', '{"b":2}'], end: null })
    expect(text).toBe('id: 7\ndata: {"a":1}\n\nid: 8\ndata: {"b":2}\n\n')
  })

  it('ends with [DONE]', () => {
    expect(blocksOf('openai', { first: 2, chunks: ['[DONE]'], end: 'done' })).toBe('id: 2\ndata: [DONE]\n\n')
  })

  it('has no [DONE] behind an error', () => {
    const text = blocksOf('openai', {
      first: 1,
      chunks: ['{}', forms.openai.failed(failures.interrupted)],
      end: 'error',
    })
    expect(text).toContain('data: {"error":{"message":')
    expect(text).not.toContain('[DONE]')
  })
})

describe('blocksOf, native', () => {
  it('is chunk events', () => {
    const text = blocksOf('native', { first: 1, chunks: ['{"content":"a"}'], end: null })
    expect(text).toBe('id: 1\nevent: chunk\ndata: {"content":"a"}\n\n')
  })

  it('completes, then says [DONE] without a number: resuming behind it finds nothing left', () => {
    const text = blocksOf('native', { first: 3, chunks: ['{"chunk_count":2}'], end: 'done' })
    expect(text).toBe('id: 3\nevent: complete\ndata: {"chunk_count":2}\n\ndata: [DONE]\n\n')
  })

  it('sends a failure as an error event', () => {
    const text = blocksOf('native', { first: 1, chunks: [forms.native.failed(failures.cancelled)], end: 'cancelled' })
    expect(text).toContain(
      'event: error\ndata: {"message":"The generation was cancelled.","code":"generation_cancelled","retryable":false}',
    )
  })
})

describe('while it waits', () => {
  it("is a comment with one newline in OpenAI's form: a blank line would be a block without data", () => {
    expect(forms.openai.queued(3, 12)).toBe(': queued position=3 eta_seconds=12\n')
    expect(forms.openai.status({ status: 'queued', stream_id: 'x', thread_id: 'y' })).toBe(': queued\n')
  })

  it('is an event of its own, without a number, in the native form', () => {
    expect(forms.native.queued(3, 12)).toBe('event: queued\ndata: {"position":3,"eta_seconds":12}\n\n')
  })
})
