import { EventEmitter, once } from 'node:events'
import { describe, expect, it } from 'vitest'
import { runUntilSignal } from './signals.js'

function setting() {
  const signals = new EventEmitter()
  const events: string[] = []
  const observed = new EventEmitter()
  const say = (event: string) => {
    events.push(event)
    observed.emit(event)
  }
  let drained: () => void = () => undefined
  const draining = new Promise<void>((resolve) => {
    drained = resolve
  })
  const server = {
    started: Promise.resolve(),
    close: async () => {
      say('close')
      await draining
    },
  }
  const options = {
    signals,
    exit: (code: number) => say(`exit ${code}`),
    onStart: () => say('start'),
    onSignal: (signal: string) => say(signal),
  }
  return { signals, events, observed, server, options, drained }
}

describe('runUntilSignal', () => {
  it('drains on the first signal and lets go of its handlers', async () => {
    const { signals, events, observed, server, options, drained } = setting()
    const started = once(observed, 'start')
    const run = runUntilSignal(async () => server, options)
    await started
    signals.emit('SIGTERM')
    drained()
    await run
    expect(events).toEqual(['start', 'SIGTERM', 'close'])
    expect(signals.listenerCount('SIGTERM') + signals.listenerCount('SIGINT')).toBe(0)
  })

  it('ends at once on the second signal', async () => {
    const { signals, events, observed, server, options, drained } = setting()
    const started = once(observed, 'start')
    const closing = once(observed, 'close')
    const run = runUntilSignal(async () => server, options)
    await started
    signals.emit('SIGTERM')
    await closing
    signals.emit('SIGINT')
    expect(events).toEqual(['start', 'SIGTERM', 'close', 'exit 130'])
    drained()
    await run
  })

  it('keeps a signal that comes during the start', async () => {
    const { signals, events, server, options, drained } = setting()
    const run = runUntilSignal(async () => {
      signals.emit('SIGINT')
      return server
    }, options)
    drained()
    await run
    expect(events).toEqual(['SIGINT', 'close'])
  })

  it('reports a failed start and a failed close', async () => {
    const { signals, options } = setting()
    const failure = new Error('no')
    await expect(runUntilSignal(() => Promise.reject(failure), options)).rejects.toBe(failure)
    expect(signals.listenerCount('SIGTERM')).toBe(0)
    const run = runUntilSignal(async () => {
      signals.emit('SIGINT')
      return { started: Promise.resolve(), close: () => Promise.reject(failure) }
    }, options)
    await expect(run).rejects.toBe(failure)
  })

  it('closes what it opened if the start fails, and throws the reason', async () => {
    const { events, server, options, drained } = setting()
    drained()
    const hopeless = { ...server, started: Promise.reject(new Error('the schema is newer')) }
    await expect(runUntilSignal(async () => hopeless, options)).rejects.toThrow('the schema is newer')
    expect(events).toEqual(['start', 'close'])
  })
})
