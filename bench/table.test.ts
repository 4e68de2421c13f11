import { describe, expect, it } from 'vitest'
import { markdownTable, textTable } from './table.js'

const columns = [{ title: 'name' }, { title: 'n', align: 'right' }] as const

describe('textTable', () => {
  it('aligns, as wide as the widest cell', () => {
    expect(
      textTable(columns, [
        ['a', '1,000'],
        ['longer', '7'],
      ]),
    ).toBe(['name        n', '------  -----', 'a       1,000', 'longer      7'].join('\n'))
  })

  it('leaves no blanks at the ends of lines', () => {
    const text = textTable(
      [{ title: 'a' }, { title: 'b' }],
      [
        ['x', ''],
        ['y', 'long'],
      ],
    )
    expect(text.split('\n').filter((line) => line.endsWith(' '))).toEqual([])
  })
})

describe('markdownTable', () => {
  it('marks the alignment and keeps cells intact', () => {
    expect(markdownTable(columns, [['a|b\nc', '1']])).toBe(['| name | n |', '|---|--:|', '| a\\|b c | 1 |'].join('\n'))
  })

  it('fills cells that a row lacks', () => {
    expect(
      markdownTable(columns, [['a']])
        .split('\n')
        .at(-1),
    ).toBe('| a |  |')
  })
})
