/** docs/benchmarks.md, made from docs/benchmarks/latest.json alone. */
import { busyWarning } from './environment.js'
import { formatDuration, formatNumber, formatQuantity } from './number-format.js'
import { commitText, figureColumns, figureRows, settingsText } from './report.js'
import type { MeasuredSection, Published } from './results.js'
import type { Figure, Verdict } from './section.js'
import { markdownTable } from './table.js'

const head = `# Benchmarks

This page is written by \`npm run bench\`: do not edit it. Repeat it on your machine:

\`\`\`sh
npm ci && npm run bench            # all of it; --list says how long each section takes
npm run bench -- --only accept --quick
\`\`\`

It needs no service: PostgreSQL is included, and the peers are installed into \`bench/\` on the first run. All variants of a
section are measured in one run, alternating, on the same machine and the same PostgreSQL with \`fsync\` on. Ratios
depend less on the machine than absolute figures; both are given. A ratio is to the first line of its group.
`

export function renderPage(published: Published): string {
  const { sections } = published
  const blocks = sections.map((section) => sectionBlock(section, sections[0]))
  return [head, targetsBlock(sections), ...blocks].join('\n')
}

function targetsBlock(sections: readonly MeasuredSection[]): string {
  const verdicts = sections.flatMap((section) => section.result.verdicts)
  if (verdicts.length === 0) return ''
  const met = verdicts.filter((verdict) => verdict.met).length
  const columns = [
    { title: 'target' },
    { title: 'wanted', align: 'right' },
    { title: 'is', align: 'right' },
    { title: '' },
  ] as const
  return `## Targets

${met} of ${verdicts.length} are met. Missed targets are listed too; [why](decisions/speed.md).

${markdownTable(columns, verdicts.map(verdictRow))}
`
}

function verdictRow({ what, value, unit, rule, target, met, note }: Verdict): string[] {
  const wanted = `${rule === 'at-least' ? '≥' : '≤'} ${formatQuantity(target, unit)}`
  return [
    note === undefined ? what : `${what} (${note})`,
    wanted,
    formatQuantity(value, unit),
    met ? 'met' : '**missed**',
  ]
}

function sectionBlock(section: MeasuredSection, first: MeasuredSection | undefined): string {
  const { title, result } = section
  const plots = result.plots.map((plot) => `![${plot.title}](benchmarks/${plot.name}.svg)`)
  const notes = [...result.notes, ...result.figures.flatMap(figureNote)].map((note) => `- ${note}`)
  return [
    `## ${title}`,
    '',
    measuredLine(section),
    '',
    ...(section === first || !sameEnvironment(section, first) ? [environmentBlock(section), ''] : []),
    ...plots.flatMap((plot) => [plot, '']),
    markdownTable(figureColumns, figureRows(result.figures)),
    '',
    ...(notes.length > 0 ? [...notes, ''] : []),
  ].join('\n')
}

function measuredLine({ measuredAt, environment, seconds, quick, stolenPercent }: MeasuredSection): string {
  const how = quick ? ', by a quick run: less certain' : ''
  const warning = busyWarning(environment)
  const mind = warning === null ? '' : ` Mind that ${warning}.`
  const stolen = stolenPercent ? ` The machine's host kept ${stolenPercent}% of it for others meanwhile (steal).` : ''
  return `Measured on ${measuredAt.slice(0, 10)} at commit ${commitText(environment.commit)}, in ${formatDuration(seconds)} minutes${how}.${mind}${stolen}`
}

/** Printed once if all sections share it. */
function environmentBlock({ environment }: MeasuredSection): string {
  const { machine, versions, postgres, loadGenerator } = environment
  const sync = machine.fdatasyncMs === null ? '' : `; 8 kB are durable after ${formatNumber(machine.fdatasyncMs)} ms`
  return markdownTable(
    [{ title: '' }, { title: '' }],
    [
      ['machine', `${machine.cpu}, ${machine.cores} cores, ${machine.memoryGb} GB, ${machine.system}`],
      ['disk', `${machine.disk}${sync}`],
      ['PostgreSQL', `${postgres.version}: ${settingsText(postgres.settings)}`],
      [
        'versions',
        Object.entries(versions)
          .map(([name, version]) => `${name} ${version}`)
          .join(', '),
      ],
      ['load', loadGenerator],
    ],
  )
}

function sameEnvironment(a: MeasuredSection, b: MeasuredSection | undefined): boolean {
  const comparable = (section: MeasuredSection | undefined): string => {
    if (section === undefined) return ''
    const { machine, versions, postgres, loadGenerator } = section.environment
    const { fdatasyncMs: _, busyPercent: __, ...lasting } = machine
    return JSON.stringify([lasting, versions, postgres, loadGenerator])
  }
  return comparable(a) === comparable(b)
}

const figureNote = ({ variant, what, note }: Figure): string[] =>
  note === undefined ? [] : [`${what}, ${variant}: ${note}`]
