import { describe, expect, it } from 'vitest'
import { parseOptions, UsageError } from './options.js'

const names = ['accept', 'drain', 'idle']
const parse = (...args: string[]) => parseOptions(args, names)

describe('parseOptions', () => {
  it('means everything, at length, with an own PostgreSQL, when nothing is said', () => {
    expect(parse()).toEqual({
      only: [],
      quick: false,
      databaseUrl: null,
      out: null,
      write: false,
      strict: false,
      list: false,
      help: false,
    })
  })

  it('takes sections apart at commas and over several options, each once', () => {
    expect(parse('--only', 'idle, accept', '--only=idle').only).toEqual(['idle', 'accept'])
  })

  it('names an unknown section and the existing ones', () => {
    expect(() => parse('--only', 'accept,drian')).toThrow(/"drian".*accept, drain, idle/)
  })

  it('does not take an empty list for all', () => {
    expect(() => parse('--only', '')).toThrow(UsageError)
  })

  it('refuses an unknown option, and says where to look', () => {
    expect(() => parse('--quik')).toThrow(/--quik.*--help/)
  })

  it('refuses a stray word: it may be a section whose --only was forgotten', () => {
    expect(() => parse('accept')).toThrow(UsageError)
  })

  it('refuses a flag with a value and a value that is missing', () => {
    expect(() => parse('--quick=yes')).toThrow(UsageError)
    expect(() => parse('--out')).toThrow(UsageError)
  })

  it('refuses an invalid connection string', () => {
    expect(() => parse('--database-url', 'localhost:5432')).toThrow(/postgres:\/\//)
    expect(parse('--database-url', 'postgresql://u@h/d').databaseUrl).toBe('postgresql://u@h/d')
  })
})
