import { spawn } from 'node:child_process'
import type { Account } from './account.js'
import { EmbeddedError, errnoOf } from './error.js'

/** Where and as whom a PostgreSQL program runs. */
export interface Placement {
  cwd: string
  /** The value of -D. */
  dataArgument: string
  account?: Account
}

/** Takes nothing from the caller's environment: PGDATA, PGPORT, LC_ALL and others would change the server's behavior. */
export function programEnvironment(): NodeJS.ProcessEnv {
  const kept = ['PATH', 'SystemRoot', 'TEMP', 'TMP', 'USERPROFILE']
  const values = kept.flatMap((name) => (process.env[name] === undefined ? [] : [[name, process.env[name]]]))
  return { ...Object.fromEntries(values), LC_ALL: 'C', TZ: 'UTC' }
}

const OUTPUT_MAX_CHARS = 8_192

/** Runs a program to its end; throws on any exit status but 0, with the end of its output. */
export function runProgram(program: string, placement: Placement, args: string[], stdin?: number): Promise<void> {
  return new Promise((resolve, reject) => {
    const child = spawn(program, args, {
      cwd: placement.cwd,
      env: programEnvironment(),
      stdio: [stdin ?? 'ignore', 'pipe', 'pipe'],
      windowsHide: true,
      ...placement.account,
    })
    let output = ''
    const collect = (chunk: Buffer) => {
      output = (output + chunk.toString('utf8')).slice(-OUTPUT_MAX_CHARS)
    }
    child.stdout?.on('data', collect)
    child.stderr?.on('data', collect)
    child.once('error', (error) => reject(spawnFailure(program, error)))
    child.once('close', (code, signal) => {
      if (code === 0) resolve()
      else
        reject(
          new EmbeddedError('start_failed', `${program} ended with ${signal ?? `status ${code}`}: ${output.trim()}`),
        )
    })
  })
}

export function spawnFailure(program: string, error: Error): EmbeddedError {
  const errno = errnoOf(error)
  if (errno === 'EPERM' || errno === 'EINVAL') {
    return new EmbeddedError(
      'start_failed',
      'PostgreSQL does not run as root and this process may not change to another account; run Spillway as an ordinary user or set DATABASE_URL',
      { cause: error },
    )
  }
  return new EmbeddedError(
    errno === 'ENOENT' ? 'platform_unsupported' : 'start_failed',
    `${program} cannot be executed on this system (the embedded PostgreSQL needs glibc on Linux); set DATABASE_URL to use a server of your own`,
    { cause: error },
  )
}
