import { describe, expect, it } from 'vitest'
import { Progress } from './progress.js'

describe('Progress', () => {
  const started = (plan: { name: string; seconds: number }[]) => {
    const lines: string[] = []
    let now = 0
    const progress = new Progress(
      plan,
      (line) => lines.push(line),
      () => now,
    )
    return { progress, lines, pass: (seconds: number) => (now += seconds * 1_000) }
  }

  it('shows the time spent and the time left, for the current section and the next ones', () => {
    const { progress, lines, pass } = started([
      { name: 'accept', seconds: 60 },
      { name: 'idle', seconds: 30 },
    ])
    progress.say('starting')
    pass(5)
    progress.begin('accept')
    pass(20)
    progress.say('round 1')
    expect(lines).toEqual(['[0:00, about 1:30 left] starting', '[0:25, about 1:10 left] accept: round 1'])
  })

  it('does not count a section below zero that takes longer than it said', () => {
    const { progress, pass } = started([
      { name: 'accept', seconds: 10 },
      { name: 'idle', seconds: 30 },
    ])
    progress.begin('accept')
    pass(500)
    expect(progress.secondsLeft()).toBe(30)
  })
})
