import { execFileSync } from 'node:child_process'
import { readFileSync, readlinkSync } from 'node:fs'
import { setTimeout as delay } from 'node:timers/promises'
import { errnoOf } from './error.js'

interface ProcStat {
  state: string
  startTicks: string
}

/** The second field (the command) may hold spaces and brackets, so fields are counted after the last one. */
export function parseProcStat(text: string): ProcStat | undefined {
  const fields = text
    .slice(text.lastIndexOf(')') + 1)
    .trim()
    .split(/\s+/)
  const [state] = fields
  const startTicks = fields[19]
  return state && startTicks ? { state, startTicks } : undefined
}

function readProcStat(pid: number): ProcStat | undefined {
  try {
    return parseProcStat(readFileSync(`/proc/${pid}/stat`, 'utf8'))
  } catch (error) {
    const errno = errnoOf(error)
    if (errno === 'ENOENT' || errno === 'ESRCH') return undefined
    throw error
  }
}

/**
 * Whether a process exists and runs. A zombie does not count: in a container without a reaping init, a killed holder stays a
 * zombie forever, and signal 0 still finds it.
 */
export function isAlive(pid: number): boolean {
  try {
    process.kill(pid, 0)
  } catch (error) {
    if (errnoOf(error) === 'ESRCH') return false
    if (errnoOf(error) !== 'EPERM') throw error
  }
  if (process.platform !== 'linux') return true
  const stat = readProcStat(pid)
  return stat !== undefined && stat.state !== 'Z' && stat.state !== 'X'
}

/**
 * A text that differs between two processes with the same pid, also across a reboot. Undefined if the platform does not
 * report it: then the pid alone decides.
 */
export function startIdentity(pid: number): string | undefined {
  if (process.platform === 'linux') {
    const stat = readProcStat(pid)
    return stat && `${readFileSync('/proc/sys/kernel/random/boot_id', 'utf8').trim()}/${stat.startTicks}`
  }
  if (process.platform === 'win32') return undefined
  return psField(pid, 'lstart')
}

/** Whether `pid` is a PostgreSQL server whose working directory (or command line) is this cluster. */
export function isPostmasterOf(pid: number, clusterDir: string): boolean {
  if (!isAlive(pid)) return false
  if (process.platform === 'linux') {
    try {
      return (
        readlinkSync(`/proc/${pid}/cwd`) === clusterDir &&
        readFileSync(`/proc/${pid}/comm`, 'utf8').trim() === 'postgres'
      )
    } catch (error) {
      const errno = errnoOf(error)
      // Another user's process cannot be the server of a cluster that we own.
      if (errno === 'EACCES' || errno === 'EPERM' || errno === 'ENOENT' || errno === 'ESRCH') return false
      throw error
    }
  }
  if (process.platform === 'win32') return true
  const command = psField(pid, 'command')
  return (command?.includes('postgres') && command.includes(clusterDir)) ?? false
}

function psField(pid: number, field: 'lstart' | 'command'): string | undefined {
  try {
    return execFileSync('ps', ['-p', String(pid), '-ww', '-o', `${field}=`], { encoding: 'utf8' }).trim() || undefined
  } catch (error) {
    // ps exits with status 1 when there is no such process.
    if (error instanceof Error && 'status' in error && error.status === 1) return undefined
    throw error
  }
}

/** Resolves to true once the process is gone, to false if it still runs after `timeoutMs`. */
export async function waitForExit(pid: number, timeoutMs: number): Promise<boolean> {
  const deadline = performance.now() + timeoutMs
  while (isAlive(pid)) {
    if (performance.now() >= deadline) return false
    await delay(25)
  }
  return true
}
