import { execFileSync } from 'node:child_process'
import { existsSync } from 'node:fs'
import path from 'node:path'
import { root } from './build.mjs'

/** Files that are, or could be, committed: tracked ones and new ones that git does not ignore. Relative, with `/`. */
export function sourceFiles() {
  const listed = execFileSync('git', ['ls-files', '-z', '--cached', '--others', '--exclude-standard'], {
    cwd: root,
    encoding: 'utf8',
    maxBuffer: 64 * 1024 * 1024,
  })
  return [...new Set(listed.split('\0'))].filter((file) => file && existsSync(path.join(root, file))).sort()
}
