import { describe, expect, it } from 'vitest'
import { figure, verdict } from './figures.js'
import { figureRows, sectionText, verdictLine } from './report.js'

const figures = [
  figure({ what: 'rate', variant: 'echo', unit: '/s', runs: [10_000, 10_000] }),
  figure({ what: 'rate', variant: 'spillway', unit: '/s', runs: [8_000, 9_000, 8_500] }),
  figure({ what: 'rate', variant: 'other', unit: '/s', runs: [123] }),
  figure({ what: 'latency', variant: 'echo', unit: 'ms', runs: [2] }),
  figure({ what: 'latency', variant: 'spillway', unit: 'ms', runs: [3], note: 'a note' }),
]

describe('figureRows', () => {
  it('names a measurement once, and holds each variant against the first of it', () => {
    expect(figureRows(figures)).toEqual([
      ['rate', 'echo', '10,000/s', '10,000–10,000', ''],
      ['', 'spillway', '8,500/s', '8,000–9,000', '0.85'],
      ['', 'other', '123/s', '', '0.012'],
      ['latency', 'echo', '2 ms', '', ''],
      ['', 'spillway', '3 ms', '', '1.50'],
    ])
  })

  it('makes no ratio of different units, nor to zero', () => {
    const rows = figureRows([
      figure({ what: 'idle', variant: 'queries', unit: '/s', runs: [0] }),
      figure({ what: 'idle', variant: 'more queries', unit: '/s', runs: [5] }),
      figure({ what: 'idle', variant: 'memory', unit: 'MB', runs: [90] }),
    ])
    expect(rows.map((row) => row.at(-1))).toEqual(['', '', ''])
  })
})

describe('verdictLine', () => {
  it('shows the target and the result in words', () => {
    const met = verdict({ what: 'over echo', value: 0.85, unit: '×', rule: 'at-least', target: 0.8 })
    const missed = verdict({ what: 'memory', value: 150, unit: 'MB', rule: 'at-most', target: 130, note: 'at start' })
    expect(verdictLine(met)).toBe('met    over echo: 0.85 ×, wanted at least 0.8 ×')
    expect(verdictLine(missed)).toBe('MISSED memory: 150 MB, wanted at most 130 MB (at start)')
  })
})

describe('sectionText', () => {
  it('has the figures, their notes and the verdicts', () => {
    const text = sectionText('Accepting', { figures, verdicts: [] })
    expect(text).toContain('8,500/s')
    expect(text).toContain('latency, spillway: a note')
  })
})
