import { problems } from '@spillway/protocol/wire'
import { describe, expect, it } from 'vitest'
import { pathOf, problemDocument, rawProblemAnswer } from './problem.js'

const place = { instance: '/x', traceId: 'a'.repeat(32), random: () => 0 }

describe('problem document', () => {
  it('has the standard members, which extensions cannot replace', () => {
    const document = problemDocument(
      { code: 'not_found', detail: 'No such thing.', extensions: { status: 200, code: 'fine', queueDepth: 3 } },
      place,
    )
    expect(document).toEqual({
      type: 'urn:spillway:error:not_found',
      title: 'Not Found',
      status: 404,
      detail: 'No such thing.',
      instance: '/x',
      code: 'not_found',
      trace_id: place.traceId,
      queueDepth: 3,
    })
  })

  it('says when to retry on every 429 and 503 and nowhere else', () => {
    for (const [code, { status }] of Object.entries(problems)) {
      const document = problemDocument({ code: code as keyof typeof problems, detail: '' }, place)
      expect(document.retry_after_seconds).toBe(status === 429 || status === 503 ? 1 : undefined)
    }
    expect(problemDocument({ code: 'rate_limited', detail: '', retryAfterMs: 59_001 }, place)).toMatchObject({
      retry_after_seconds: 60,
    })
  })

  it('takes a type and a title of its own', () => {
    const own = { type: 'https://archon72.io/errors/queue-overflow', title: 'Queue Overflow' }
    expect(problemDocument({ code: 'capacity_exceeded', detail: '', ...own }, place)).toMatchObject(own)
  })

  it.each([
    ['/a/b?c=d', '/a/b'],
    ['/', '/'],
    ['http://host:80/a?b', '/a'],
    ['http://host?b', '/'],
    ['/a?u=http://x/y', '/a'],
    ['*', '*'],
  ])('instance of %s is %s', (target, path) => {
    expect(pathOf(target)).toBe(path)
  })

  it('makes a raw answer whose length is that of its body', () => {
    const [head, body] = rawProblemAnswer({ code: 'not_ready', detail: 'ü' }, 'b'.repeat(32)).split('\r\n\r\n')
    expect(head).toContain(`content-length: ${Buffer.byteLength(body ?? '')}`)
    expect(head).toContain(`retry-after: ${JSON.parse(body ?? '').retry_after_seconds}`)
  })

  it('writes a raw answer in the form of the requested path', () => {
    const bodyOf = (target: string) =>
      JSON.parse(
        rawProblemAnswer({ code: 'request_timeout', detail: 'Late.' }, 'b'.repeat(32), target).split('\r\n\r\n')[1] ??
          '',
      )
    expect(bodyOf('/v1/chat/completions?a=b')).toEqual({
      error: { message: 'Late.', type: 'invalid_request_error', param: null, code: 'request_timeout' },
    })
    expect(bodyOf('/api/v1/push')).toMatchObject({ code: 'request_timeout', instance: '/api/v1/push' })
  })

  it('takes a status of its own, and goes by it', () => {
    const passedOn = problemDocument({ code: 'upstream_rejected', detail: '', status: 429 }, place)
    expect(passedOn).toMatchObject({ status: 429, retry_after_seconds: 1 })
    expect(problemDocument({ code: 'upstream_rejected', detail: '', status: 422 }, place).status).toBe(422)
  })
})
