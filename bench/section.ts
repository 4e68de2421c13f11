/**
 * What a section of the benchmark is given and what it gives back. A section measures; the runner (run.ts) starts
 * PostgreSQL, shows progress, and turns the figures into the table, the JSON, the plots and docs/benchmarks.md.
 */

import type { LoadGenerator } from './load/index.js'

export interface BenchPostgres {
  /** A superuser's connection string to the server's `postgres` database. */
  readonly url: string
  readonly version: string
  /** fsync, synchronous_commit, full_page_writes, shared_buffers, …: as the server itself reports them. */
  readonly settings: Readonly<Record<string, string>>
  /** An empty database of its own; its connection string. */
  createDatabase(name: string): Promise<string>
  dropDatabase(name: string): Promise<void>
}

export interface BenchProcess {
  readonly pid: number
  /** Everything written to standard output so far. */
  stdout(): string
  /** Resolves with the first line of standard output that matches, rejects when the process ends first. */
  line(pattern: RegExp, timeoutMs?: number): Promise<RegExpExecArray>
  /** SIGTERM, then SIGKILL after 10 s; resolves when it is gone. */
  stop(): Promise<void>
}

export interface BenchContext {
  /** Shorter and less certain: for a first look and for CI. */
  readonly quick: boolean
  readonly postgres: BenchPostgres
  /** One line of progress. */
  say(text: string): void
  /** Closed-loop HTTP load: wrk where it can be had, else autocannon. Stopped with the section. */
  readonly load: LoadGenerator
  /**
   * A program of bench/ in a process of its own: `programs/echo.ts`. `peer: true` runs it on a Node.js that the peers
   * accept (≥ 22.18). Whatever is still running when the section ends is stopped by the runner.
   */
  start(program: string, options?: { env?: Record<string, string>; peer?: boolean }): BenchProcess
  /** The real `spillway serve` on its own database, default logging and metrics, on a free port. */
  serve(env: Record<string, string>): Promise<BenchProcess & { readonly origin: string }>
}

/** One measured figure: the median of its runs, all of them beside it. */
export interface Figure {
  /** What was measured: `accept over HTTP, 64 connections`. */
  readonly what: string
  /** Whose figure: `spillway`, `echo`, `pg-boss send`, … */
  readonly variant: string
  /** `/s`, `ms`, `MB`, … */
  readonly unit: string
  readonly value: number
  readonly runs: readonly number[]
  readonly note?: string
}

/** A target of the project and what came of it. `at-least`: value ≥ target, `at-most`: value ≤ target. */
export interface Verdict {
  readonly what: string
  readonly value: number
  readonly unit: string
  readonly rule: 'at-least' | 'at-most'
  readonly target: number
  readonly met: boolean
  readonly note?: string
}

export interface Plot {
  /** Also its file name: kebab-case. */
  readonly name: string
  readonly title: string
  readonly xLabel: string
  readonly yLabel: string
  readonly kind: 'bars' | 'lines'
  /** `lines`: points are [x, y]; `bars`: one point per series, x ignored. `logX`/`logY` for lines. */
  readonly series: readonly { readonly name: string; readonly points: readonly (readonly [number, number])[] }[]
  readonly logX?: boolean
  readonly logY?: boolean
}

export interface SectionResult {
  readonly figures: readonly Figure[]
  readonly verdicts: readonly Verdict[]
  readonly plots: readonly Plot[]
  /** Sentences for docs/benchmarks.md: how it was measured, what it does not show. */
  readonly notes: readonly string[]
}

export interface Section {
  /** For `--only`: one word. */
  readonly name: string
  readonly title: string
  estimateSeconds(quick: boolean): number
  run(context: BenchContext): Promise<SectionResult>
}
