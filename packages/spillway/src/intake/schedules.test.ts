import { Cron } from 'croner'
import { describe, expect, it } from 'vitest'
import { dueTimes } from './schedules.js'

const times = (cron: string): Cron => new Cron(cron, { timezone: 'UTC', paused: true })
const at = (text: string): number => Date.parse(`2026-03-10T${text}Z`)
const texts = (all: readonly Date[]): string[] => all.map((one) => one.toISOString().slice(11, 19))

describe('dueTimes', () => {
  it('are all that passed within a minute, in order', () => {
    const schedule = { times: times('*/20 * * * * *'), missed: 'skip' as const }
    const found = dueTimes(schedule, { nextMs: at('10:00:00'), nowMs: at('10:00:45') })
    expect(texts(found.due)).toEqual(['10:00:00', '10:00:20', '10:00:40'])
    expect(found).toMatchObject({ last: new Date(at('10:00:40')), next: new Date(at('10:01:00')), missed: false })
  })

  it('that are older were missed: skipped, or one for the last of them', () => {
    const moment = { nextMs: at('03:00:00'), nowMs: at('10:00:30') }
    const hourly = times('0 * * * *')
    expect(texts(dueTimes({ times: hourly, missed: 'skip' }, moment).due)).toEqual(['10:00:00'])
    expect(texts(dueTimes({ times: hourly, missed: 'once' }, moment).due)).toEqual(['09:00:00', '10:00:00'])
    const daily = times('0 3 * * *')
    expect(dueTimes({ times: daily, missed: 'skip' }, moment)).toMatchObject({ due: [], last: new Date(moment.nextMs) })
    expect(texts(dueTimes({ times: daily, missed: 'once' }, moment).due)).toEqual(['03:00:00'])
  })

  it('of an earlier text are kept: the row was due by it', () => {
    const schedule = { times: times('0 12 * * *'), missed: 'once' as const }
    const found = dueTimes(schedule, { nextMs: at('03:00:00'), nowMs: at('10:00:00') })
    expect(texts(found.due)).toEqual(['03:00:00'])
    expect(found.next).toEqual(new Date(at('12:00:00')))
  })

  it('are as many as a minute has seconds, after a year in which nothing ran', () => {
    const schedule = { times: times('* * * * * *'), missed: 'once' as const }
    const found = dueTimes(schedule, { nextMs: at('10:00:00') - 365 * 86_400_000, nowMs: at('10:00:00') })
    expect(found.due).toHaveLength(62)
    expect(found.next).toEqual(new Date(at('10:00:01')))
  })

  it('may be the last ones', () => {
    const found = dueTimes(
      { times: times('2026-03-10T10:00:00'), missed: 'skip' },
      { nextMs: at('10:00:00'), nowMs: at('10:00:01') },
    )
    expect(found).toMatchObject({ due: [new Date(at('10:00:00'))], next: null })
  })
})
