import { problems } from '@spillway/protocol/wire'
import { describe, expect, it } from 'vitest'
import { memberOf, openAiErrorOf } from './openai-error.js'

describe('openAiErrorOf', () => {
  it.each([
    ['invalid_request', 'invalid_request_error', 'invalid_request'],
    ['unauthenticated', 'authentication_error', 'invalid_api_key'],
    ['forbidden', 'permission_error', 'forbidden'],
    ['model_not_found', 'invalid_request_error', 'model_not_found'],
    ['method_not_allowed', 'invalid_request_error', 'method_not_allowed'],
    ['body_too_large', 'invalid_request_error', 'body_too_large'],
    ['rate_limited', 'rate_limit_error', 'rate_limit_exceeded'],
    ['connection_limit', 'rate_limit_error', 'connection_limit'],
    ['internal_error', 'server_error', 'internal_error'],
    ['upstream_timeout', 'server_error', 'upstream_timeout'],
    ['queue_timeout', 'server_error', 'queue_timeout'],
  ] as const)('%s is a %s with the code %s', (code, type, openAiCode) => {
    expect(openAiErrorOf({ code, detail: 'Why.' })).toEqual({ message: 'Why.', type, param: null, code: openAiCode })
  })

  it('uses the status that is passed if it differs', () => {
    expect(openAiErrorOf({ code: 'upstream_rejected', status: 429, detail: '' }).type).toBe('rate_limit_error')
  })

  it('reports the first fault with its path', () => {
    const errors = [
      { path: '/messages/0/role', message: 'is required' },
      { path: '/model', message: 'is required' },
    ]
    expect(openAiErrorOf({ code: 'invalid_request', detail: 'The request is not valid.', errors })).toMatchObject({
      message: 'The request is not valid: messages[0].role is required.',
      param: 'messages[0].role',
    })
  })

  it('reports a fault of the whole body without a path', () => {
    const errors = [{ path: '', message: 'a JSON body is required' }]
    expect(openAiErrorOf({ code: 'invalid_request', detail: 'The request is not valid.', errors })).toMatchObject({
      message: 'The request is not valid: a JSON body is required.',
      param: null,
    })
  })

  it('has a type for every code there is', () => {
    for (const code of Object.keys(problems) as (keyof typeof problems)[]) {
      expect(openAiErrorOf({ code, detail: 'x' }).type).toMatch(/^[a-z_]+_error$/)
    }
  })
})

describe('memberOf', () => {
  it.each([
    ['', null],
    ['/n', 'n'],
    ['/messages/12/content/0/text', 'messages[12].content[0].text'],
    ['/0', '[0]'],
    ['/a~1b/c~0d', 'a/b.c~d'],
  ])('%j is %j', (pointer, member) => {
    expect(memberOf(pointer)).toBe(member)
  })
})
