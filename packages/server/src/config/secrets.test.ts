import { describe, expect, it } from 'vitest'
import { maskUrlPasswords } from './secrets.js'

describe('maskUrlPasswords', () => {
  it.each([
    ['postgres://u:secret@db/app', 'postgres://u:***@db/app'],
    ['postgres://u:se/cr@et@db/app', 'postgres://u:***@db/app'],
    ['cannot reach redis://:secret@cache:6379 now', 'cannot reach redis://:***@cache:6379 now'],
    ['https://a.example/?x=1&password=secret#top', 'https://a.example/?x=1&password=***#top'],
    ['http://127.0.0.1:7745/api', 'http://127.0.0.1:7745/api'],
    ['write to me@example.com: soon', 'write to me@example.com: soon'],
  ])('%s', (text, masked) => {
    expect(maskUrlPasswords(text)).toBe(masked)
  })
})
