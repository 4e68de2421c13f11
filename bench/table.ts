export type Align = 'left' | 'right'

export interface Column {
  readonly title: string
  readonly align?: Align
}

/** Plain text, columns two blanks apart. */
export function textTable(columns: readonly Column[], rows: readonly (readonly string[])[]): string {
  const widths = columns.map(({ title }, index) =>
    Math.max(title.length, ...rows.map((row) => (row[index] ?? '').length)),
  )
  const line = (cells: readonly string[]): string =>
    columns
      .map(({ align }, index) => {
        const cell = cells[index] ?? ''
        const width = widths[index] ?? 0
        return align === 'right' ? cell.padStart(width) : cell.padEnd(width)
      })
      .join('  ')
      .trimEnd()
  return [
    line(columns.map(({ title }) => title)),
    line(widths.map((width) => '-'.repeat(width))),
    ...rows.map((row) => line(row)),
  ].join('\n')
}

/** GitHub's form. A cell's `|` and line breaks would end it early. */
export function markdownTable(columns: readonly Column[], rows: readonly (readonly string[])[]): string {
  const line = (cells: readonly string[]): string => `| ${cells.join(' | ')} |`
  const safe = (cell: string): string => cell.replaceAll('|', '\\|').replaceAll(/\s*\n\s*/g, ' ')
  return [
    line(columns.map(({ title }) => safe(title))),
    `|${columns.map(({ align }) => (align === 'right' ? '--:' : '---')).join('|')}|`,
    ...rows.map((row) => line(columns.map((_, index) => safe(row[index] ?? '')))),
  ].join('\n')
}
