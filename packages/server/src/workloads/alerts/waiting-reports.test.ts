import { describe, expect, it } from 'vitest'
import { type WaitingReport, WaitingReports } from './waiting-reports.js'

const firing = (key: string): WaitingReport => ({ key, status: 'firing' })
const resolved = (key: string): WaitingReport => ({ key, status: 'resolved' })

function filled(most: number, ...reports: WaitingReport[]): WaitingReports<WaitingReport> {
  const waiting = new WaitingReports<WaitingReport>(most)
  for (const report of reports) expect(waiting.add(report)).toEqual([])
  return waiting
}

function drained(waiting: WaitingReports<WaitingReport>): WaitingReport[] {
  const all: WaitingReport[] = []
  for (let next = waiting.take(); next !== undefined; next = waiting.take()) all.push(next)
  return all
}

describe('reports that wait', () => {
  it('come out in the order in which they came in', () => {
    const reports = [firing('a'), firing('b'), resolved('a')]
    expect(drained(filled(3, ...reports))).toEqual(reports)
  })

  it('lose the oldest that is over already, with its end, when there is one too many', () => {
    const waiting = filled(5, firing('a'), firing('b'), firing('c'), resolved('c'), resolved('b'))
    expect(waiting.add(firing('d'))).toEqual([firing('b'), resolved('b')])
    expect(drained(waiting)).toEqual([firing('a'), firing('c'), resolved('c'), firing('d')])
  })

  it('lose a beginning only with the end that followed it', () => {
    const waiting = filled(3, firing('a'), firing('a'), resolved('a'))
    const second = waiting.add(firing('b'))
    expect(second).toEqual([firing('a'), resolved('a')])
    expect(drained(waiting)).toEqual([firing('a'), firing('b')])
  })

  it('lose the oldest where nothing is over', () => {
    const waiting = filled(2, firing('a'), firing('b'))
    expect(waiting.add(firing('c'))).toEqual([firing('a')])
    expect(waiting.size).toBe(2)
  })

  it('keep the end of the accepted chunks', () => {
    const waiting = filled(2, firing('a'), resolved('a'))
    expect(waiting.take()).toEqual(firing('a'))
    waiting.add(firing('b'))
    expect(waiting.add(resolved('b'))).toEqual([firing('b'), resolved('b')])
    expect(drained(waiting)).toEqual([resolved('a')])
  })
})
