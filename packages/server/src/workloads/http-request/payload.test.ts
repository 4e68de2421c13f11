import { describe, expect, it } from 'vitest'
import { validateForwardPayload } from './payload.js'

const url = 'http://127.0.0.1:9/x'

describe('payload of http.request', () => {
  it('fills in the method and lower-cases headers', () => {
    expect(validateForwardPayload({ url, headers: { 'X-Key': 'v' }, body: null })).toMatchObject({
      ok: true,
      request: { url, method: 'POST', headers: { 'x-key': 'v' }, body: null },
    })
    expect(validateForwardPayload({ url, method: 'GET' })).toEqual({
      ok: true,
      url: new URL(url),
      request: { url, method: 'GET', headers: {} },
    })
  })

  it.each([
    [undefined, ''],
    [{}, '/url'],
    [{ url: 'not a url' }, '/url'],
    [{ url: '/relative' }, '/url'],
    [{ url: 'ftp://x/' }, '/url'],
    [{ url: 'http://u:p@x/' }, '/url'],
    [{ url: `http://x/${'y'.repeat(9_000)}` }, '/url'],
    [{ url, method: 'TRACE' }, '/method'],
    [{ url, method: 'GET', body: {} }, '/body'],
    [{ url, extra: 1 }, '/extra'],
    [{ url, headers: { a: 'x\r\ny: z' } }, '/headers/a'],
    [{ url, headers: { a: 'x\u2603' } }, '/headers/a'],
    [{ url, headers: { a: 1 } }, '/headers/a'],
    [{ url, headers: { 'a b': 'x' } }, '/headers/a b'],
    [{ url, headers: { '': 'x' } }, '/headers/'],
    [{ url, headers: { Host: 'evil' } }, '/headers/Host'],
    [{ url, headers: { 'Transfer-Encoding': 'chunked' } }, '/headers/Transfer-Encoding'],
    [{ url, headers: { 'content-length': '1' } }, '/headers/content-length'],
    [{ url, headers: { 'Idempotency-Key': 'mine' } }, '/headers/Idempotency-Key'],
    [{ url, headers: { traceparent: 'x' } }, '/headers/traceparent'],
    [{ url, headers: { A: '1', a: '2' } }, '/headers'],
    [{ url, headers: Object.fromEntries(Array.from({ length: 65 }, (_, n) => [`h${n}`, 'v'])) }, '/headers'],
  ])('refuses %j at %s', (payload, path) => {
    const result = validateForwardPayload(payload)
    expect(result.ok ? [] : result.errors.map((fault) => fault.path)).toContain(path)
  })
})
