import { describe, expect, it } from 'vitest'
import { fileFaults } from './file-rules.mjs'

const source = 'packages/spillway/src/pipeline/admit.ts'

describe('file rules', () => {
  it.each([
    'told',
    'rateTold',
    'RateTold',
    'toldProblem',
    'tellsOf',
    '// Tells why',
    'it was given up',
    'busy of late.',
  ])('refuses the retired word in %s', (text) => {
    expect(fileFaults('scripts/x.mjs', `ok\n${text}\n`)).toMatchObject([{ file: 'scripts/x.mjs', line: 2 }])
  })

  it.each(['untold', 'satellites', 'intells', 'of late answers', 'of late.entries()'])('allows %s', (text) => {
    expect(fileFaults('scripts/x.mjs', text)).toEqual([])
  })

  it('allows retired words in migrations', () => {
    expect(fileFaults('packages/server/src/workloads/petitions/sql/tables/0001-petitions.sql', 'x_told')).toEqual([])
  })

  it.each(['// TODO: later', '/* FIXME */', '# XXX'])('refuses %s', (text) => {
    expect(fileFaults(source, `ok\n${text}\n`)).toMatchObject([{ line: 2 }])
  })

  it('refuses a conflict that is not resolved', () => {
    expect(fileFaults('packages/x/src/a.sql', `a\n${'<'.repeat(7)} HEAD\n`)).toMatchObject([{ line: 2 }])
  })

  it.each(['it.only(', 'describe.skip(', 'it.concurrent.only(', 'test.todo(', 'xit(', 'fdescribe('])(
    'refuses %s in a test',
    (text) => {
      expect(fileFaults('packages/spillway/src/gates/rate.test.ts', text)).toHaveLength(1)
    },
  )

  it('does not mistake ordinary code for a skipped test', () => {
    const text = 'exit(1)\ncursor.skip(3)\nit.each([1])("x", () => {})\nawait submit(1)'
    expect(fileFaults('packages/spillway/src/gates/rate.test.ts', text)).toEqual([])
  })

  it('refuses a host in the lockfile', () => {
    expect(fileFaults('package-lock.json', '  "resolved": "https://example.org/x.tgz"')).toHaveLength(1)
    expect(fileFaults('package-lock.json', '  "resolved": "packages/client"')).toEqual([])
  })

  it.each(['/home/ada/spillway', "'/root/project'", 'C:\\Users\\ada', '(/work/tree/x)'])('refuses %s', (text) => {
    expect(fileFaults(source, text)).toHaveLength(1)
  })

  it.each(['/api/v1/work', 'https://example.org/home/page', './work/x', 'a/root/b'])('allows %s', (text) => {
    expect(fileFaults(source, text)).toEqual([])
  })

  it.each(['packages/spillway/src/utils.ts', 'packages/client/src/helpers/x.ts', 'packages/client/src/common/x.ts'])(
    'refuses the name %s',
    (file) => {
      expect(fileFaults(file, 'x')).toHaveLength(1)
    },
  )
})
