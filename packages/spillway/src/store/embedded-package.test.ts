import { describe, expect, it } from 'vitest'
import { startEmbedded } from './embedded-package.js'

const notFound = (name: string) => () =>
  Promise.reject(
    Object.assign(new Error(`Cannot find package '${name}' imported from @spillway/embedded-postgres/dist/x.js`), {
      code: 'ERR_MODULE_NOT_FOUND',
    }),
  )

describe('the package of the embedded PostgreSQL', () => {
  it('is named, with the command that installs it, where it is missing', async () => {
    await expect(startEmbedded({ dataDir: 'unused' }, notFound('@spillway/embedded-postgres'))).rejects.toThrow(
      /^embedded\(\) needs the package @spillway\/embedded-postgres: npm i @spillway\/embedded-postgres$/,
    )
  })

  it('is not named where something else is missing', async () => {
    await expect(startEmbedded({ dataDir: 'unused' }, notFound('pg'))).rejects.toThrow("Cannot find package 'pg'")
  })

  it('gets the options and gives the server', async () => {
    const server = { url: 'postgres://x', adopted: false, pid: 1, stop: () => Promise.resolve() }
    const load = () =>
      Promise.resolve({
        startEmbedded: ({ dataDir }: { dataDir: string }) => Promise.resolve({ ...server, url: dataDir }),
      })
    expect((await startEmbedded({ dataDir: 'folder' }, load)).url).toBe('folder')
  })
})
