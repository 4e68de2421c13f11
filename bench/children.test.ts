import { afterEach, describe, expect, it } from 'vitest'
import { Children } from './children.js'

const opened: Children[] = []

afterEach(async () => {
  await Promise.all(opened.splice(0).map((children) => children.close()))
})

function start(script: string) {
  const children = new Children()
  opened.push(children)
  const child = children.start({
    command: process.execPath,
    args: ['-e', script],
    env: {},
    cwd: process.cwd(),
    name: 'a program',
  })
  return { children, child }
}

const isAlive = (pid: number): boolean => {
  try {
    return process.kill(pid, 0)
  } catch {
    return false
  }
}

/** Runs until it is stopped. */
const lasting = "console.log('up'); setInterval(() => undefined, 1_000)"

describe('Children', () => {
  it('finds a line, whether it was written before or is written later', async () => {
    const { child } = start(`${lasting}; setTimeout(() => console.log('port 42'), 50)`)
    expect((await child.line(/port (\d+)/))[1]).toBe('42')
    expect((await child.line(/^up$/))[0]).toBe('up')
  })

  it('does not read half a line as a complete one', async () => {
    const { child } = start(
      `${lasting}; process.stdout.write('port 4'); setTimeout(() => process.stdout.write('2\\n'), 100)`,
    )
    expect((await child.line(/port (\d+)/))[1]).toBe('42')
  })

  it('says what a program said that ended too early', async () => {
    const { child } = start("console.error('no database'); process.exit(3)")
    await expect(child.line(/port/)).rejects.toThrow(/a program ended before.*\n.*no database/s)
    expect(await child.ended).toBe(3)
  })

  it('reports when a line does not arrive in time', async () => {
    const { child } = start(lasting)
    await child.line(/up/)
    await expect(child.line(/port/, 20)).rejects.toThrow(/did not within 20 ms/)
  })

  it('reports a program that cannot be started', async () => {
    const children = new Children()
    opened.push(children)
    const child = children.start({ command: '/nowhere/to/be/found', args: [], env: {}, cwd: '/', name: 'nothing' })
    await expect(child.line(/x/)).rejects.toThrow(/nothing ended before/)
  })

  it('stops running work, and starts none afterwards', async () => {
    const { children, child } = start(lasting)
    await child.line(/up/)
    await children.close()
    expect(isAlive(child.pid)).toBe(false)
    expect(() => children.start({ command: 'x', args: [], env: {}, cwd: '.', name: 'late' })).toThrow(/late/)
  })

  it('kills a program at once that ignores SIGTERM', async () => {
    const { children, child } = start(`process.on('SIGTERM', () => undefined); ${lasting}`)
    await child.line(/up/)
    children.killNow()
    await child.ended
    expect(isAlive(child.pid)).toBe(false)
  })
})
