/**
 * The programs as JavaScript, in a folder that git ignores. They are started again and again: with the compiler in front of
 * each start, a start costs twice as much, and the machine's time goes there instead of into the work.
 */
import { spawn } from 'node:child_process'
import { join } from 'node:path'

const root = join(import.meta.dirname, '../..')
const compiler = join(root, 'node_modules/typescript/bin/tsc')
const project = join(import.meta.dirname, 'tsconfig.json')

/** The path of the app. */
export async function compilePrograms(): Promise<string> {
  const child = spawn(process.execPath, [compiler, '-p', project], { cwd: root, stdio: ['ignore', 'pipe', 'inherit'] })
  let said = ''
  child.stdout.setEncoding('utf8').on('data', (text: string) => {
    said += text
  })
  const code = await new Promise<number | null>((resolve, reject) => {
    child.once('error', reject)
    child.once('close', resolve)
  })
  if (code !== 0) throw new Error(`The programs of the harness cannot be compiled:\n${said}`)
  return join(root, 'chaos/dist/programs/app.js')
}
