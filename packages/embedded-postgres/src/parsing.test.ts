import { describe, expect, it } from 'vitest'
import { parsePasswd } from './account.js'
import { parseOwner } from './folder-lock.js'
import { parsePostmasterFile } from './postmaster-file.js'
import { isAlive, parseProcStat, startIdentity } from './processes.js'

describe('parsePostmasterFile', () => {
  it('reads pid and port', () => {
    expect(parsePostmasterFile('123\n/data\n1700000000\n5433\n\n127.0.0.1\n')).toEqual({ pid: 123, port: 5433 })
  })

  it('takes a file that was cut off', () => {
    expect(parsePostmasterFile('123\n/data\n')).toEqual({ pid: 123 })
    expect(parsePostmasterFile('')).toBeUndefined()
    expect(parsePostmasterFile('garbage')).toBeUndefined()
  })
})

describe('parseProcStat', () => {
  it('is not misled by a command with blanks and brackets', () => {
    const rest = ['S', ...Array.from({ length: 18 }, (_, index) => index), '987654', '0'].join(' ')
    expect(parseProcStat(`42 (a) b (c)) ${rest}\n`)).toEqual({ state: 'S', startTicks: '987654' })
    expect(parseProcStat('42 (cut)')).toBeUndefined()
  })
})

describe('isAlive', () => {
  it('knows this process and no process', () => {
    expect(isAlive(process.pid)).toBe(true)
    expect(isAlive(2 ** 22 + 1)).toBe(false)
    expect(startIdentity(process.pid)).toBe(startIdentity(process.pid))
  })
})

describe('parsePasswd', () => {
  it('finds the account nobody, also as macOS writes it, and never root', () => {
    expect(parsePasswd('root:x:0:0::/:/bin/sh\nnobody:x:99:98::/:/x\n', 'nobody')).toEqual({ uid: 99, gid: 98 })
    expect(parsePasswd('nobody:*:-2:-2::/:/x', 'nobody')).toEqual({ uid: 4294967294, gid: 4294967294 })
    expect(parsePasswd('nobody:x:0:0::/:/x', 'nobody')).toBeUndefined()
    expect(parsePasswd('root:x:0:0::/:/bin/sh', 'nobody')).toBeUndefined()
  })
})

describe('parseOwner', () => {
  it('reads an owner and takes anything else for unwritten', () => {
    expect(parseOwner('{"pid":7,"start":"a","token":"t"}')).toEqual({ pid: 7, start: 'a', token: 't' })
    expect(parseOwner('{"pid":7,"token":"t","released":true}')).toEqual({ pid: 7, token: 't', released: true })
    for (const text of ['', '{', 'null', '{"pid":"7"}', '{"pid":7}']) expect(parseOwner(text)).toBeUndefined()
  })
})
