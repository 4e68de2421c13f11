import { describe, expect, it } from 'vitest'
import { createClient } from './client.js'
import { type ClientOptions, settingsOf } from './options.js'

const baseUrl = 'http://spillway.test'

describe('options that cannot be meant', () => {
  it.each<[string, Partial<ClientOptions>]>([
    ['credentials', { baseUrl: 'http://user:secret@spillway.test' }],
    ['a query', { baseUrl: 'http://spillway.test/?a=secret' }],
    ['an empty query', { baseUrl: 'http://spillway.test?' }],
    ['a fragment', { baseUrl: 'http://spillway.test/#secret' }],
    ['an identity that is no header', { identity: 'secret 日本' }],
    ['an identity of two lines', { identity: 'secret\r\nx: y' }],
    ['a header value that is none', { headers: { 'x-a': 'secret\0' } }],
    ['a header name that is none', { headers: { 'x a': 'secret' } }],
    ['a deadline that is no number', { deadlineMs: Number.NaN }],
    ['a deadline below 0', { deadlineMs: -1 }],
    ['a delay that is no number', { maxRetryDelay: Number.NaN }],
    ['a delay below 0', { retry: { maxRetryDelayMs: -1 } }],
    ['no attempt', { retry: { attempts: 0 } }],
    ['a budget below 0', { retry: { budget: { reserve: -1 } } }],
    ['a throttle that is no number', { throttle: { ratio: Number.NaN } }],
    ['no URL', { baseUrl: '', baseUrls: [] }],
  ])('are refused at once, and not repeated in the message: %s', (_, options) => {
    const make = () => createClient({ baseUrl, ...options })
    expect(make).toThrow(TypeError)
    expect(make).not.toThrow(/secret/)
  })
})

it('no base URLs leave the one', () => {
  expect(settingsOf({ baseUrl: `${baseUrl}/prefix//`, baseUrls: [] }).bases).toEqual([`${baseUrl}/prefix`])
})

it('times without end are options', () => {
  expect(settingsOf({ baseUrl, deadlineMs: Number.POSITIVE_INFINITY })).toMatchObject({ deadlineMs: Infinity })
})

describe('what the caller gives with a call', () => {
  const sent: RequestInit[] = []
  const client = createClient({
    baseUrl,
    fetch: async (_, init) => {
      sent.push(init ?? {})
      return Response.json([])
    },
  })

  it.each<[string, () => Promise<unknown>]>([
    ['a key that is no header', () => client.push('q', [1], { idempotencyKey: '日本' })],
    ['a thread that is no header', () => client.generate({ query: 'q', model: 'm', threadId: '日本' }).text()],
    ['an id that is no text', () => client.petitions.get('\ud800')],
    ['a lease that is no text', () => client.messages.extend('\ud800')],
    ['a policy that is no text', () => client.routing.policies.remove('\ud800')],
    ['an empty id', () => client.operations.get('')],
    ['the queue .', () => client.messages.pop('.')],
    ['the queue ..', () => client.messages.pop({ queue: '..' })],
    ['the partition ..', () => client.messages.pop({ queue: 'q', partition: '..' })],
    ['a deadline that is no number', () => client.push('q', [1], { deadlineMs: Number.NaN })],
    ['a deadline below 0', () => client.push('q', [1], { deadlineMs: -1 })],
    ['a wait that is no number', () => client.messages.pop('q', { waitMs: Number.NaN })],
    ['a silence that is no number', () => client.resume('id', { silentMs: Number.NaN }).text()],
  ])('is refused before anything is sent: %s', async (_, call) => {
    let given: Promise<unknown> | undefined
    expect(() => {
      given = call()
    }).not.toThrow()
    await expect(given).rejects.toThrow(TypeError)
    expect(sent).toEqual([])
  })
})
