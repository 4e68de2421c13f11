/**
 * Builds, and makes the tarball of a package self-contained. @spillway/protocol is a package of this workspace and is in no
 * registry, and npm cannot bundle a dependency that is hoisted to the workspace's root (it would pack paths that
 * start with `../..`). So `prepack` builds and puts a real copy under the package's own node_modules, where
 * `bundleDependencies` finds it, and `postpack` takes it away again. A package that does not bundle it gets only the
 * shared files.
 *
 *   node scripts/bundle-protocol.mjs in|out     (npm runs it with the package's folder as working directory)
 */
import { spawnSync } from 'node:child_process'
import { copyFileSync, cpSync, existsSync, mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import path from 'node:path'
import { build, root } from './build.mjs'

const sharedFiles = ['LICENSE', 'README.md']

function removeCopies(packageDir) {
  rmSync(path.join(packageDir, 'node_modules/@spillway'), { recursive: true, force: true })
  for (const file of sharedFiles) {
    const copy = path.join(packageDir, file)
    if (isCopy(copy, path.join(root, file))) rmSync(copy)
  }
}

/** A file that the package has of its own, in git or with other content, is never taken away. */
function isCopy(copy, original) {
  if (!existsSync(copy) || !existsSync(original)) return false
  if (!readFileSync(copy).equals(readFileSync(original))) return false
  return spawnSync('git', ['ls-files', '--error-unmatch', copy], { cwd: root, stdio: 'ignore' }).status !== 0
}

function putCopies(packageDir) {
  const { bundleDependencies = [] } = JSON.parse(readFileSync(path.join(packageDir, 'package.json'), 'utf8'))
  if (bundleDependencies.includes('@spillway/protocol')) putProtocol(packageDir)
  for (const file of sharedFiles) {
    const copy = path.join(packageDir, file)
    if (existsSync(path.join(root, file)) && !existsSync(copy)) copyFileSync(path.join(root, file), copy)
  }
}

function putProtocol(packageDir) {
  const source = path.join(root, 'packages/protocol')
  const target = path.join(packageDir, 'node_modules/@spillway/protocol')
  mkdirSync(target, { recursive: true })
  cpSync(path.join(source, 'dist'), path.join(target, 'dist'), {
    recursive: true,
    filter: (file) => !file.endsWith('.tsbuildinfo'),
  })
  // The package around it declares the same dependencies: listed here they would be bundled too, from the root's
  // node_modules, by a path outside the tarball.
  const { dependencies: _, scripts: __, ...manifest } = JSON.parse(readFileSync(path.join(source, 'package.json')))
  writeFileSync(path.join(target, 'package.json'), `${JSON.stringify(manifest, null, 2)}\n`)
}

const packageDir = process.cwd()
switch (process.argv[2]) {
  case 'in':
    if ((await build()) !== 0) process.exit(1)
    putCopies(packageDir)
    break
  case 'out':
    removeCopies(packageDir)
    break
  default:
    console.error('usage: bundle-protocol.mjs in|out')
    process.exit(2)
}
