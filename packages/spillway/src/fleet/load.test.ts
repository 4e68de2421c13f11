import { describe, expect, it } from 'vitest'
import type { Pulse } from '../store/port.js'
import { Load } from './load.js'

const pulse = (held: number): Pulse => ({
  ...{ alive: true, waiting: false, nextDueMs: null, oldestMs: 0, running: {}, deadLetters: 0 },
  ...{ gates: [], halts: [], cancels: [], lostWorkers: 0, held: { work: held } },
})

describe('the load as a process knows it', () => {
  it('is the count of the last heartbeat and the operations accepted here since', () => {
    const load = new Load()
    load.figures()
    load.observe(pulse(5), 1_000)
    load.accepted()
    load.accepted()
    expect(load.depth).toBe(7)
    load.figures()
    load.observe(pulse(7), 1_000)
    expect(load.depth).toBe(7)
  })

  it('keeps counting operations accepted during a heartbeat', () => {
    const load = new Load()
    load.accepted()
    load.figures()
    load.accepted()
    load.observe(pulse(1), 1_000)
    expect(load.depth).toBe(2)
    load.figures()
    load.observe(pulse(2), 1_000)
    expect(load.depth).toBe(2)
  })

  it('is less by the operations that left here since', () => {
    const load = new Load()
    load.figures()
    load.observe(pulse(2), 1_000)
    for (let n = 0; n < 50; n++) {
      load.accepted()
      load.settled()
    }
    expect(load.depth).toBe(2)
    load.settled()
    expect(load.depth).toBe(1)
    load.figures()
    load.observe(pulse(1), 1_000)
    expect(load.depth).toBe(1)
  })

  it('does not forget what left while a heartbeat was under way', () => {
    const load = new Load()
    load.figures()
    load.observe(pulse(3), 1_000)
    load.figures()
    load.settled()
    load.observe(pulse(3), 1_000)
    expect(load.depth).toBe(2)
  })

  it('is never less than nothing: what left here may have been accepted elsewhere', () => {
    const load = new Load()
    load.settled()
    expect(load.depth).toBe(0)
  })

  it('keeps count when a heartbeat is not answered', () => {
    const load = new Load()
    load.accepted()
    load.figures()
    load.accepted()
    load.figures()
    load.observe(pulse(2), 1_000)
    expect(load.depth).toBe(2)
  })
})
