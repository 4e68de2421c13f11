import { describe, expect, it } from 'vitest'
import { ApiError, createApi } from './api.js'

interface Call {
  url: string
  method: string | undefined
  body: unknown
  authorization: string | null
}

function fakeServer(status: number, answer: unknown) {
  const calls: Call[] = []
  const fetch = async (url: string | URL | Request, init?: RequestInit) => {
    calls.push({
      url: String(url),
      method: init?.method,
      body: typeof init?.body === 'string' ? JSON.parse(init.body) : undefined,
      authorization: new Headers(init?.headers).get('authorization'),
    })
    return new Response(typeof answer === 'string' ? answer : JSON.stringify(answer), { status })
  }
  return { calls, api: (key: string | null = null) => createApi({ url: 'http://h:1/', key, fetch }) }
}

describe('createApi', () => {
  it('calls the routes that callers build on', async () => {
    const { calls, api } = fakeServer(200, {})
    const { listOperations, showOperation, changeOperation, listDeadLetters, ...more } = api()
    await listOperations({ status: 'failed', queue: 'a&b', type: undefined })
    await showOperation('a/b', '30')
    await changeOperation('i', 'retry')
    await changeOperation('i', 'cancel')
    await listDeadLetters({})
    await more.showDeadLetter('a/b')
    await more.redrive({ ids: ['i'] })
    await more.purge({ queue: 'q' }, 200)
    expect(calls.map(({ method, url, body }) => [method, url, body])).toEqual([
      ['GET', 'http://h:1/api/v1/operations?status=failed&queue=a%26b', undefined],
      ['GET', 'http://h:1/api/v1/operations/a%2Fb?wait=30', undefined],
      ['POST', 'http://h:1/api/v1/operations/i/retry', undefined],
      ['POST', 'http://h:1/api/v1/operations/i/cancel', undefined],
      ['GET', 'http://h:1/api/v1/dead-letters', undefined],
      ['GET', 'http://h:1/api/v1/dead-letters/a%2Fb', undefined],
      ['POST', 'http://h:1/api/v1/dead-letters/redrive', { ids: ['i'] }],
      ['DELETE', 'http://h:1/api/v1/dead-letters?queue=q&limit=200', undefined],
    ])
  })

  it('sends the key only when there is one', async () => {
    const { calls, api } = fakeServer(200, {})
    await api('k').listDeadLetters({})
    await api().listDeadLetters({})
    expect(calls.map((call) => call.authorization)).toEqual(['Bearer k', null])
  })

  it('names a problem by its code', async () => {
    const problem = { code: 'not_found', title: 'Not Found', detail: 'no such operation', trace_id: 't' }
    const failure = await fakeServer(404, problem)
      .api()
      .showOperation('i')
      .catch((error: unknown) => error)
    expect(failure).toBeInstanceOf(ApiError)
    expect(failure).toMatchObject({ code: 'not_found' })
  })

  it.each([
    [200, '<html>'],
    [502, 'Bad Gateway'],
    [500, { other: true }],
  ])('does not take %d %j for a server of ours', async (status, answer) => {
    await expect(fakeServer(status, answer).api().listDeadLetters({})).rejects.toMatchObject({ code: 'unexpected' })
  })

  it('says that nothing answers', async () => {
    const fetch = () => Promise.reject(new TypeError('fetch failed'))
    const api = createApi({ url: 'http://h:1', key: null, fetch })
    await expect(api.listDeadLetters({})).rejects.toMatchObject({ code: 'unreachable' })
  })
})
