/** Text in a plot: its measure is estimated, as nothing is rendered here. */

/** Widest ordinary letters of a sans-serif are near 0.6 em on average text; a little more than that is never too little. */
const emPerCharacter = 0.58

export const textWidth = (text: string, fontSize: number): number => text.length * fontSize * emPerCharacter

export const escapeXml = (text: string): string =>
  text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;').replaceAll('"', '&quot;')

/** Lines no wider than that, broken between words; a word that is too wide gets its own line. */
export function wrapText(text: string, width: number, fontSize: number): string[] {
  const lines: string[] = []
  let line = ''
  for (const word of text.split(/\s+/)) {
    const longer = line === '' ? word : `${line} ${word}`
    if (line !== '' && textWidth(longer, fontSize) > width) {
      lines.push(line)
      line = word
    } else line = longer
  }
  return [...lines, line]
}

/** For ticks: 10k, 2.5M. */
export function shortNumber(value: number): string {
  for (const [size, letter] of [
    [1e9, 'G'],
    [1e6, 'M'],
    [1e4, 'k'],
  ] as const) {
    const unit = letter === 'k' ? 1_000 : size
    if (Math.abs(value) >= size) return `${Number((value / unit).toPrecision(3))}${letter}`
  }
  return String(Number(value.toPrecision(3)))
}
