/** Writes what a run gave: JSON and plots for this run, and the page in docs. */
import { existsSync } from 'node:fs'
import { mkdir, readdir, readFile, rm, writeFile } from 'node:fs/promises'
import path from 'node:path'
import { renderPage } from './docs-page.js'
import { renderPlot } from './plots/svg.js'
import { type MeasuredSection, merge, type Published, type RunReport } from './results.js'

const root = path.join(import.meta.dirname, '..')
const page = path.join(root, 'docs/benchmarks.md')
const pageDir = path.join(root, 'docs/benchmarks')
const latest = path.join(pageDir, 'latest.json')

/** Returns the JSON file's path, relative to the current directory. */
export async function writeResults(report: RunReport, out: string | null): Promise<string> {
  const dir = path.resolve(out ?? path.join(root, 'bench/results'))
  await mkdir(dir, { recursive: true })
  await writePlots(dir, report.sections)
  const file = path.join(dir, `bench-${report.startedAt.replaceAll(/[:.]/g, '-')}.json`)
  await writeFile(file, `${JSON.stringify(report, null, 2)}\n`)
  return path.relative(process.cwd(), file)
}

/** Refreshes the page: the sections of this run, and the latest results of the others. */
export async function publish(measured: readonly MeasuredSection[], names: readonly string[]): Promise<string> {
  const old = existsSync(latest) ? (JSON.parse(await readFile(latest, 'utf8')) as Published) : { sections: [] }
  const published = merge(old, measured, names)
  await mkdir(pageDir, { recursive: true })
  await writeFile(latest, `${JSON.stringify(published, null, 2)}\n`)
  await writePlots(pageDir, published.sections)
  const shown = new Set(published.sections.flatMap(({ result }) => result.plots.map((plot) => `${plot.name}.svg`)))
  for (const file of await readdir(pageDir)) {
    if (file.endsWith('.svg') && !shown.has(file)) await rm(path.join(pageDir, file))
  }
  await writeFile(page, renderPage(published))
  return path.relative(process.cwd(), page)
}

async function writePlots(dir: string, sections: readonly MeasuredSection[]): Promise<void> {
  for (const plot of sections.flatMap(({ result }) => result.plots)) {
    await writeFile(path.join(dir, `${plot.name}.svg`), renderPlot(plot))
  }
}
