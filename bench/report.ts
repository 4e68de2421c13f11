/** Figures and verdicts as rows: for the terminal and for docs/benchmarks.md alike. */
import type { Environment } from './environment.js'
import { formatNumber, formatQuantity } from './number-format.js'
import type { Figure, Verdict } from './section.js'
import { range } from './statistics.js'
import { type Column, textTable } from './table.js'

export const figureColumns: readonly Column[] = [
  { title: 'what' },
  { title: 'variant' },
  { title: 'median', align: 'right' },
  { title: 'range', align: 'right' },
  { title: 'ratio', align: 'right' },
]

/** The ratio is to the first variant of the same measurement: 1.00 is what the others are held against. */
export function figureRows(figures: readonly Figure[]): string[][] {
  const first = new Map<string, Figure>()
  return figures.map((figure, index) => {
    const { what, variant, unit, value, runs } = figure
    const group = `${what}\0${unit}`
    const reference = first.get(group)
    if (reference === undefined) first.set(group, figure)
    const { min, max } = range(runs)
    return [
      figures[index - 1]?.what === what ? '' : what,
      variant,
      formatQuantity(value, unit),
      runs.length > 1 ? `${formatNumber(min)}–${formatNumber(max)}` : '',
      reference === undefined || reference.value === 0 ? '' : formatRatio(value / reference.value),
    ]
  })
}

const formatRatio = (ratio: number): string => (ratio >= 0.1 ? ratio.toFixed(2) : ratio.toPrecision(2))

/** `met: Spillway over bare echo is 0.83 ×, at least 0.8 × was wanted`. */
export function verdictLine(verdict: Verdict): string {
  const { what, value, unit, rule, target, met, note } = verdict
  const wanted = `${rule === 'at-least' ? 'at least' : 'at most'} ${formatQuantity(target, unit)}`
  return `${met ? 'met   ' : 'MISSED'} ${what}: ${formatQuantity(value, unit)}, wanted ${wanted}${note === undefined ? '' : ` (${note})`}`
}

export function environmentLines({ machine, versions, postgres, commit, loadGenerator }: Environment): string[] {
  const sync = machine.fdatasyncMs === null ? '' : `, 8 kB made durable in ${formatNumber(machine.fdatasyncMs)} ms`
  return [
    `machine     ${machine.cpu}, ${machine.cores} cores, ${machine.memoryGb} GB, ${machine.system}`,
    `disk        ${machine.disk}${sync}`,
    `commit      ${commitText(commit)}`,
    `versions    ${Object.entries(versions)
      .map(([name, version]) => `${name} ${version}`)
      .join(', ')}`,
    `PostgreSQL  ${postgres.version}: ${settingsText(postgres.settings)}`,
    `load        ${loadGenerator}`,
  ]
}

export const commitText = ({ id, dirty }: Environment['commit']): string =>
  dirty ? `${id} with uncommitted changes` : id

export const settingsText = (settings: Readonly<Record<string, string>>): string =>
  Object.entries(settings)
    .map(([name, value]) => `${name} ${value}`)
    .join(', ')

export function sectionText(
  title: string,
  result: { figures: readonly Figure[]; verdicts: readonly Verdict[] },
): string {
  const notes = result.figures.flatMap(({ what, variant, note }) =>
    note === undefined ? [] : [`  ${what}, ${variant}: ${note}`],
  )
  return [
    title,
    '',
    textTable(figureColumns, figureRows(result.figures)),
    ...(notes.length > 0 ? ['', ...notes] : []),
    ...(result.verdicts.length > 0 ? ['', ...result.verdicts.map((verdict) => verdictLine(verdict))] : []),
    '',
  ].join('\n')
}
