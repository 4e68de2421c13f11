import { readdir, readFile } from 'node:fs/promises'
import { gzipSync } from 'node:zlib'
import { beforeAll, expect, it } from 'vitest'
import { bundledClient } from './bundle.js'

/** 12 kB. */
const bytesMax = 12_288
let code = ''

beforeAll(async () => {
  code = await bundledClient()
})

it('the whole client has less than 12 kB, minified and compressed', () => {
  const { length } = gzipSync(code, { level: 9 })
  console.log(`${code.length} bytes, ${length} compressed`)
  expect(length).toBeGreaterThan(1_000)
  expect(length).toBeLessThan(bytesMax)
})

it('the client needs nothing but what every runtime has', () => {
  expect(code).toContain('createClient')
  expect(code).not.toMatch(/\bfrom\s*["']|\bimport\s*\(|\brequire\s*\(|node:|\bprocess\.|\bBuffer\b/)
})

it('nothing that is published imports anything but its neighbours', async () => {
  const dist = new URL('../dist/', import.meta.url)
  const files = (await readdir(dist, { recursive: true })).filter((name) => name.endsWith('.js'))
  const specifiers = await Promise.all(
    files.map(async (name) => {
      const text = await readFile(new URL(name, dist), 'utf8')
      return [...text.matchAll(/^(?:import|export)[^'"\n]*['"]([^'"\n]+)['"];?$/gm)].map(([, from = '']) => from)
    }),
  )
  expect(files.length).toBeGreaterThan(10)
  expect(specifiers.flat().filter((specifier) => !specifier.startsWith('.'))).toEqual([])
})
