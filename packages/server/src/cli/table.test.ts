import { describe, expect, it } from 'vitest'
import { renderTable } from './table.js'

describe('renderTable', () => {
  it('aligns its columns and takes the cells by title', () => {
    const table = renderTable([{ b: 'x', a: 'long cell' }, { a: 's' }], ['a', 'b'])
    expect(table).toBe('a          b\nlong cell  x\ns\n')
  })

  it('cuts long cells and disarms control characters', () => {
    const table = renderTable([{ a: `\u001b[2J${'x'.repeat(200)}` }], ['a'])
    expect(table).not.toContain('\u001b')
    expect(table).toContain('…')
    expect(table.length).toBeLessThan(100)
  })
})
