/** Column title → cell. */
export type TableRow = Readonly<Record<string, string>>

// Control characters in a queue name or an error message could rewrite the operator's screen.
// biome-ignore lint/suspicious/noControlCharactersInRegex: they are what is to be replaced
const control = /[\u0000-\u001f\u007f-\u009f]/gu
const cellMaxDefault = 80

/** Columns padded to their widest cell, two spaces between, the last not padded. Longer cells are cut with an ellipsis. */
export function renderTable(rows: readonly TableRow[], titles: readonly string[], cellMax = cellMaxDefault): string {
  const lines = [titles, ...rows.map((row) => titles.map((title) => clean(row[title] ?? '', cellMax)))]
  const widths = titles.map((_, column) => Math.max(...lines.map((line) => (line[column] ?? '').length)))
  return lines
    .map((line) =>
      line
        .map((cell, column) => cell.padEnd(widths[column] ?? 0))
        .join('  ')
        .trimEnd(),
    )
    .map((line) => `${line}\n`)
    .join('')
}

function clean(cell: string, cellMax: number): string {
  const plain = cell.replace(control, '�')
  return plain.length > cellMax ? `${plain.slice(0, cellMax - 1)}…` : plain
}
