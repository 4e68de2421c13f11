import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { type RoomEnd, type RoomRequest, WaitingRoom } from './waiting-room.js'

beforeEach(() => void vi.useFakeTimers())
afterEach(() => void vi.useRealTimers())

/** A room, and the order in which its requests left it. */
function watched() {
  const room = new WaitingRoom()
  const left: string[] = []
  const enter = (name: string, request: Partial<RoomRequest> = {}): Promise<RoomEnd> =>
    room.wait({ identity: name.charAt(0), waitMs: 100, most: 100, ...request }).then((end) => {
      left.push(`${name} ${end}`)
      return end
    })
  /** So many slots are free. */
  const free = async (slots: number): Promise<void> => {
    let taken = 0
    room.admit(() => taken++ < slots)
    await vi.advanceTimersByTimeAsync(0)
  }
  return { room, left, enter, free }
}

describe('WaitingRoom', () => {
  it('gives slots in the order of arrival within an identity, and identities take turns', async () => {
    const { left, enter, free } = watched()
    for (const name of ['a1', 'a2', 'a3', 'a4', 'b1', 'c1', 'b2']) void enter(name)
    await free(5)
    expect(left).toEqual(['a1 slot', 'b1 slot', 'c1 slot', 'a2 slot', 'b2 slot'])
    await free(5)
    expect(left.slice(5)).toEqual(['a3 slot', 'a4 slot'])
  })

  it('takes no slot when nobody waits', async () => {
    const { room } = watched()
    const take = vi.fn(() => true)
    room.admit(take)
    expect(take).not.toHaveBeenCalled()
  })

  it('sends away who waited for too long, and leaves no timer', async () => {
    const { room, left, enter } = watched()
    void enter('a1', { waitMs: 50 })
    void enter('a2')
    await vi.advanceTimersByTimeAsync(50)
    expect(left).toEqual(['a1 late'])
    await vi.advanceTimersByTimeAsync(50)
    expect(left).toEqual(['a1 late', 'a2 late'])
    expect(room.size).toBe(0)
    expect(vi.getTimerCount()).toBe(0)
  })

  it('sends the oldest away when it is full', async () => {
    const { room, left, enter, free } = watched()
    for (const name of ['a1', 'a2', 'a3']) void enter(name, { most: 2 })
    await vi.advanceTimersByTimeAsync(0)
    expect(left).toEqual(['a1 full'])
    expect(room.hasRoomFor('a', 2)).toBe(false)
    expect(room.hasRoomFor('a', 3)).toBe(true)
    // One identity cannot keep all others out.
    expect(room.hasRoomFor('b', 2)).toBe(true)
    void enter('b1', { most: 2 })
    await free(1)
    expect(left).toEqual(['a1 full', 'a2 full', 'a3 slot'])
  })

  it('frees the place of a caller who leaves, or who has left already', async () => {
    const { room, left, enter, free } = watched()
    const leaving = new AbortController()
    void enter('a1', { signal: leaving.signal })
    void enter('a2')
    leaving.abort()
    void enter('a3', { signal: leaving.signal })
    await free(2)
    expect(left).toEqual(['a1 gone', 'a3 gone', 'a2 slot'])
    expect(room.size).toBe(0)
  })

  it('sends everybody away when it closes, and lets nobody in any more', async () => {
    const { room, left, enter } = watched()
    void enter('a1')
    void enter('b1')
    room.close()
    expect(room.hasRoomFor('c', 10)).toBe(false)
    expect(await enter('c1')).toBe('closed')
    expect(left).toEqual(['a1 closed', 'b1 closed', 'c1 closed'])
    expect(vi.getTimerCount()).toBe(0)
  })
})
