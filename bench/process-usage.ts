/** CPU time and memory of a process, as the operating system reports them. */
import { execFileSync } from 'node:child_process'
import { readFileSync } from 'node:fs'
import { platform } from 'node:os'

export interface Usage {
  /** CPU time since it started, user and system. */
  readonly cpuSeconds: number
  readonly rssMb: number
}

/** Linux counts in ticks of 1/100 s on every machine that Node.js runs on. */
const ticksPerSecond = 100

export function usageOf(pid: number): Usage {
  return platform() === 'linux' ? fromProc(pid) : fromPs(pid)
}

function fromProc(pid: number): Usage {
  // The name, in parentheses, may hold blanks; what follows the last one does not.
  const stat = readFileSync(`/proc/${pid}/stat`, 'utf8')
  const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ')
  const ticks = Number(fields[11]) + Number(fields[12])
  const rssKb = Number(/^VmRSS:\s+(\d+) kB$/m.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))?.[1])
  return { cpuSeconds: ticks / ticksPerSecond, rssMb: rssKb / 1_024 }
}

function fromPs(pid: number): Usage {
  const [rss = '', time = ''] = execFileSync('ps', ['-o', 'rss=,time=', '-p', String(pid)], { encoding: 'utf8' })
    .trim()
    .split(/\s+/)
  return { cpuSeconds: parseCpuTime(time), rssMb: Number(rss) / 1_024 }
}

/** `[[dd-]hh:]mm:ss[.ff]`, as ps writes it. */
export function parseCpuTime(text: string): number {
  const [days, clock] = text.includes('-') ? text.split('-') : ['0', text]
  const parts = (clock ?? '').split(':').map(Number)
  return Number(days) * 86_400 + parts.reduce((sum, part) => sum * 60 + part, 0)
}
