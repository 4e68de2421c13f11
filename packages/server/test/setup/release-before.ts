/** The build of the release before this one, from the commit named in release-before.json, in a temp folder of its own. */
import { execFile } from 'node:child_process'
import { mkdtemp, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'

const run = promisify(execFile)
const root = fileURLToPath(new URL('../../../../', import.meta.url))

export interface ReleaseBefore {
  release: string
  /** What `node` runs. */
  program: string
  remove(): Promise<void>
}

export async function buildReleaseBefore(): Promise<ReleaseBefore> {
  const file = new URL('./release-before.json', import.meta.url)
  const { release, commit }: { release: string; commit: string } = JSON.parse(await readFile(file, 'utf8'))
  await run('git', ['cat-file', '-e', `${commit}^{commit}`], { cwd: root }).catch((cause: unknown) => {
    throw new Error(`Release ${release} (commit ${commit}) is not in this clone: fetch the whole history.`, { cause })
  })
  const folder = await mkdtemp(join(tmpdir(), 'spillway-release-before-'))
  const remove = (): Promise<void> => rm(folder, { recursive: true, force: true })
  try {
    const archive = join(folder, 'sources.tar')
    await run('git', ['archive', '--output', archive, commit], { cwd: root })
    await run('tar', ['-xf', archive], { cwd: folder })
    await run('npm', ['ci', '--prefer-offline', '--no-audit', '--no-fund'], { cwd: folder })
    await run('npm', ['run', 'build'], { cwd: folder })
  } catch (fault) {
    await remove()
    throw fault
  }
  return { release, program: join(folder, 'packages/server/dist/cli/main.js'), remove }
}
