import { describe, expect, it } from 'vitest'
import { renderPage } from './docs-page.js'
import type { Environment } from './environment.js'
import { figure, verdict } from './figures.js'
import { type MeasuredSection, merge } from './results.js'

const environment: Environment = {
  machine: {
    cpu: 'A CPU',
    cores: 2,
    memoryGb: 24,
    system: 'linux',
    disk: '/dev/vda (ext4)',
    fdatasyncMs: 0.4,
    busyPercent: 3,
  },
  versions: { node: '20.20.2', spillway: '0.1.0' },
  postgres: { version: '18.4', settings: { fsync: 'on' } },
  commit: { id: 'abc1234567', dirty: false },
  loadGenerator: 'wrk 4.1.0',
}

function section(name: string, more: Partial<MeasuredSection> = {}): MeasuredSection {
  return {
    name,
    title: `About ${name}`,
    measuredAt: '2026-11-15T12:00:00.000Z',
    seconds: 75,
    quick: false,
    environment,
    result: {
      figures: [
        figure({ what: 'accept', variant: 'echo', unit: '/s', runs: [10_000, 12_000, 11_000] }),
        figure({ what: 'accept', variant: 'spillway', unit: '/s', runs: [9_000, 9_900, 8_000], note: 'no ledger yet' }),
      ],
      verdicts: [verdict({ what: 'over echo', value: 0.82, unit: '×', rule: 'at-least', target: 0.8 })],
      plots: [{ name: `${name}-plot`, title: 'A plot', xLabel: '', yLabel: '', kind: 'bars', series: [] }],
      notes: ['How it was measured.'],
    },
    ...more,
  }
}

describe('renderPage', () => {
  const page = renderPage({ sections: [section('accept'), section('idle')] })

  it('says of each section when and at which commit it was measured', () => {
    expect(page.match(/Measured on 2026-11-15 at commit abc1234567, in 1:15 minutes\./g)).toHaveLength(2)
  })

  it('shows medians, ranges and ratios', () => {
    expect(page).toContain('| accept | echo | 11,000/s | 10,000–12,000 |  |')
    expect(page).toContain('|  | spillway | 9,000/s | 8,000–9,900 | 0.82 |')
  })

  it('lists the targets, and how many are met', () => {
    expect(page).toContain('2 of 2 are met')
    expect(page).toContain('| over echo | ≥ 0.8 × | 0.82 × | met |')
  })

  it('shows plots and notes, also of figures', () => {
    expect(page).toContain('![A plot](benchmarks/idle-plot.svg)')
    expect(page).toContain('- How it was measured.')
    expect(page).toContain('- accept, spillway: no ledger yet')
  })

  it('describes a machine once that all sections share, and another one where it is used', () => {
    expect(page.match(/A CPU, 2 cores/g)).toHaveLength(1)
    const other = { ...environment, machine: { ...environment.machine, cpu: 'Another CPU' } }
    const mixed = renderPage({ sections: [section('accept'), section('idle', { environment: other })] })
    expect(mixed).toContain('Another CPU')
  })

  it('reports what was measured with --quick, and uncommitted changes', () => {
    const dirty = { ...environment, commit: { id: 'abc1234567', dirty: true } }
    const hasty = renderPage({ sections: [section('accept', { quick: true, environment: dirty })] })
    expect(hasty).toContain('abc1234567 with uncommitted changes')
    expect(hasty).toContain('quick run')
  })

  it('says that a machine was busy, and nothing of one that was not', () => {
    const busy = { ...environment, machine: { ...environment.machine, busyPercent: 60 } }
    expect(renderPage({ sections: [section('accept', { environment: busy })] })).toContain('60% busy')
    expect(page).not.toContain('busy')
  })

  it('says how much of the machine its host kept, and nothing where that is nothing or unknown', () => {
    expect(renderPage({ sections: [section('accept', { stolenPercent: 28 })] })).toContain('kept 28% of it')
    expect(renderPage({ sections: [section('accept', { stolenPercent: 0 })] })).not.toContain('kept')
    expect(page).not.toContain('kept')
  })

  it('marks a missed target', () => {
    const missed = verdict({ what: 'over echo', value: 0.5, unit: '×', rule: 'at-least', target: 0.8 })
    const result = { ...section('accept').result, verdicts: [missed] }
    expect(renderPage({ sections: [section('accept', { result })] })).toContain('| 0.5 × | **missed** |')
  })
})

describe('merge', () => {
  const names = ['accept', 'drain', 'idle']

  it('replaces sections measured again, and keeps the rest, in the order of the sections', () => {
    const old = { sections: [section('idle', { seconds: 1 }), section('accept', { seconds: 1 })] }
    const merged = merge(old, [section('accept', { seconds: 2 })], names)
    expect(merged.sections.map(({ name, seconds }) => [name, seconds])).toEqual([
      ['accept', 2],
      ['idle', 1],
    ])
  })

  it('drops a section that is none any more', () => {
    expect(merge({ sections: [section('gone')] }, [], names).sections).toEqual([])
  })
})
