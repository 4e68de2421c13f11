import { describe, expect, it } from 'vitest'
import { codeFaults, declaredCodes, documentedCodes } from './problem-codes.mjs'

const source = `export const problems = {
  not_found: { status: 404, title: 'Not Found' },
  halted: {
    status: 503,
    title: 'Halted',
  },
} as const`
const notFound = '| `not_found` | 404 | Not Found | No such thing. | Check the path. |'
const halted = '| `halted` | 503 | Halted | Stopped. | Wait. |'
const faults = (...rows) => codeFaults(declaredCodes(source), documentedCodes(rows.join('\n')))

describe('codes against docs', () => {
  it('reads entries on one line and on several', () => {
    expect(declaredCodes(source)).toEqual({
      not_found: { status: 404, title: 'Not Found' },
      halted: { status: 503, title: 'Halted' },
    })
  })

  it('finds nothing when both say the same', () => {
    expect(faults(notFound, halted)).toEqual([])
  })

  it.each([
    ['a code that is not documented', [notFound]],
    ['a documented code that does not exist', [notFound, halted, halted.replace('halted', 'gone')]],
    ['another status', [notFound.replace('404', '410'), halted]],
    ['another title', [notFound.replace('Not Found', 'Missing'), halted]],
    ['no advice', [notFound.replace('Check the path.', ''), halted]],
  ])('finds %s', (_, rows) => {
    expect(faults(...rows)).toHaveLength(1)
  })

  it('does not pass on a source it cannot read', () => {
    expect(codeFaults(declaredCodes('nothing here'), {})).toHaveLength(1)
  })
})
