/** CPU time that a virtual machine wanted and its host gave to others ("steal"). It shows in every tail, and in no profile. */
import { readFileSync } from 'node:fs'
import { platform } from 'node:os'

export interface CpuTime {
  readonly total: number
  readonly stolen: number
}

/** Of all cores, since the start; null if the system does not report it. */
export function readCpuTime(): CpuTime | null {
  return platform() === 'linux' ? parseCpuTime(readFileSync('/proc/stat', 'utf8')) : null
}

/** The first line: user, nice, system, idle, iowait, irq, softirq, steal; guests are counted in user already. */
export function parseCpuTime(stat: string): CpuTime | null {
  const times = /^cpu +([\d ]+)$/m.exec(stat)?.[1]?.split(' ').slice(0, 8).map(Number) ?? []
  const stolen = times[7]
  return stolen === undefined ? null : { total: times.reduce((sum, time) => sum + time, 0), stolen }
}

/** Percent of the machine; null if unknown. */
export function stolenPercent(before: CpuTime | null, after: CpuTime | null): number | null {
  if (before === null || after === null || after.total <= before.total) return null
  return Math.round((100 * (after.stolen - before.stolen)) / (after.total - before.total))
}
