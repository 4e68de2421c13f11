/** Plots as SVG by hand: readable on light and dark pages, nothing clipped, no dependency. */
import { formatNumber } from '../number-format.js'
import type { Plot } from '../section.js'
import { linearScale, logScale, type Scale } from './scale.js'
import { escapeXml, shortNumber, textWidth, wrapText } from './text.js'

const width = 800
const margin = 24
const titleSize = 17
const textSize = 13
const lineHeight = 1.35

/** Also distinct for people with colour blindness (Okabe and Ito's set, without the yellow that vanishes on white). */
const colours = ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#56b4e9', '#e69f00', '#8c6bb1', '#7f7f7f']
/** In a plot of bars colour says one thing only: which are ours. */
const ownBar = '#0072b2'
const otherBar = '#8c959f'
const dashes = ['', '7 4', '2 4', '9 3 2 3']

const style = `
  .page { fill: #ffffff }
  text { fill: #1f2328; font: ${textSize}px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif }
  .title { font-size: ${titleSize}px; font-weight: 600 }
  .grid { stroke: #d0d7de; stroke-width: 1 }
  .axis { stroke: #656d76; stroke-width: 1 }
  .soft { fill: #59636e }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 }
    text { fill: #e6edf3 }
    .grid { stroke: #30363d }
    .axis { stroke: #8b949e }
    .soft { fill: #9198a1 }
  }`

export function renderPlot(plot: Plot): string {
  const titleLines = wrapText(plot.title, width - 2 * margin, titleSize)
  const top = margin + titleLines.length * titleSize * lineHeight + 8
  const title = titleLines.map((line, index) =>
    label(line, margin, margin + titleSize + index * titleSize * lineHeight, 'class="title"'),
  )
  const { height, parts } = plot.kind === 'bars' ? bars(plot, top) : lines(plot, top)
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${round(height)}" width="${width}" height="${round(height)}" role="img" aria-label="${escapeXml(plot.title)}">`,
    `<style>${style}\n</style>`,
    `<rect class="page" width="${width}" height="${round(height)}"/>`,
    ...title,
    ...parts,
    '</svg>',
    '',
  ].join('\n')
}

interface Drawn {
  readonly height: number
  readonly parts: readonly string[]
}

/** Lying bars: names of variants are long, and are read from left to right. */
function bars({ series, yLabel }: Plot, top: number): Drawn {
  const values = series.map(({ points }) => points[0]?.[1] ?? 0)
  const widest = Math.max(...series.map(({ name }) => textWidth(name, textSize)))
  const nameWidth = Math.min(widest, width * 0.42)
  const valueWidth = Math.max(...values.map((value) => textWidth(formatNumber(value), textSize)))
  const left = margin + nameWidth + 10
  const right = width - margin - valueWidth - 10
  const largest = Math.max(...values, Number.MIN_VALUE)
  const parts: string[] = []
  let y = top
  series.forEach(({ name }, index) => {
    const value = values[index] ?? 0
    const names = wrapText(name, nameWidth, textSize)
    const rowHeight = Math.max(26, names.length * textSize * lineHeight + 8)
    const middle = y + rowHeight / 2
    const length = Math.max(1, ((right - left) * Math.max(0, value)) / largest)
    names.forEach((line, n) => {
      const offset = (n - (names.length - 1) / 2) * textSize * lineHeight
      parts.push(label(line, left - 10, middle + offset + textSize * 0.35, 'text-anchor="end"'))
    })
    parts.push(
      `<rect x="${round(left)}" y="${round(middle - 9)}" width="${round(length)}" height="18" rx="2" fill="${/spillway/i.test(name) ? ownBar : otherBar}"/>`,
      label(formatNumber(value), left + length + 6, middle + textSize * 0.35, ''),
    )
    y += rowHeight
  })
  parts.push(`<line class="axis" x1="${round(left)}" y1="${round(top)}" x2="${round(left)}" y2="${round(y)}"/>`)
  parts.push(label(yLabel, left, y + textSize + 8, 'class="soft"'))
  return { height: y + textSize + 8 + margin, parts }
}

const plotHeight = 300

function lines(plot: Plot, top: number): Drawn {
  const { series, xLabel, yLabel } = plot
  const points = series.flatMap((one) => one.points)
  const xs = scaleOf(
    points.map(([x]) => x),
    plot.logX,
  )
  const ys = scaleOf(
    points.map(([, y]) => y),
    plot.logY,
  )
  const tickWidth = Math.max(...ys.ticks.map((tick) => textWidth(shortNumber(tick), textSize)))
  const left = margin + tickWidth + 8
  const right = width - margin - 12
  const plotTop = top + textSize * lineHeight + 14
  const bottom = plotTop + plotHeight
  const x = (value: number): number => left + xs.at(value) * (right - left)
  const y = (value: number): number => bottom - ys.at(value) * plotHeight
  const parts = [label(yLabel, margin, top + textSize, 'class="soft"')]
  for (const tick of ys.ticks) {
    parts.push(
      `<line class="grid" x1="${round(left)}" y1="${round(y(tick))}" x2="${round(right)}" y2="${round(y(tick))}"/>`,
      label(shortNumber(tick), left - 8, y(tick) + textSize * 0.35, 'text-anchor="end" class="soft"'),
    )
  }
  for (const tick of xs.ticks) {
    parts.push(
      `<line class="grid" x1="${round(x(tick))}" y1="${round(plotTop)}" x2="${round(x(tick))}" y2="${round(bottom)}"/>`,
      label(shortNumber(tick), x(tick), bottom + textSize + 6, 'text-anchor="middle" class="soft"'),
    )
  }
  parts.push(
    `<line class="axis" x1="${round(left)}" y1="${round(bottom)}" x2="${round(right)}" y2="${round(bottom)}"/>`,
  )
  const axisLabelY = bottom + 2 * textSize * lineHeight + 8
  parts.push(label(xLabel, (left + right) / 2, axisLabelY, 'text-anchor="middle" class="soft"'))
  series.forEach((one, index) => {
    parts.push(
      ...curve(
        one.points.map(([px, py]) => [x(px), y(py)] as const),
        index,
      ),
    )
  })
  const key = legend(
    series.map(({ name }) => name),
    axisLabelY + textSize,
  )
  return { height: key.height + margin, parts: [...parts, ...key.parts] }
}

function curve(points: readonly (readonly [number, number])[], index: number): string[] {
  const path = points.map(([px, py]) => `${round(px)},${round(py)}`).join(' ')
  const markers = points.map(
    ([px, py]) => `<circle cx="${round(px)}" cy="${round(py)}" r="3.5" fill="${colour(index)}"/>`,
  )
  return [
    `<polyline points="${path}" fill="none" stroke="${colour(index)}" stroke-width="2.5" stroke-linejoin="round"${dash(index)}/>`,
    ...markers,
  ]
}

/** As many in a row as there is room for. */
function legend(names: readonly string[], top: number): Drawn {
  const parts: string[] = []
  let x = margin
  let y = top + textSize
  names.forEach((name, index) => {
    const wide = 34 + textWidth(name, textSize) + 18
    if (x > margin && x + wide > width - margin) {
      x = margin
      y += textSize * lineHeight + 6
    }
    const middle = y - textSize * 0.35
    parts.push(
      `<line x1="${round(x)}" y1="${round(middle)}" x2="${round(x + 26)}" y2="${round(middle)}" stroke="${colour(index)}" stroke-width="2.5"${dash(index)}/>`,
      label(name, x + 34, y, ''),
    )
    x += wide
  })
  return { height: y + 4, parts }
}

const scaleOf = (values: readonly number[], isLog: boolean | undefined): Scale =>
  isLog === true ? logScale(values) : linearScale(values)

const colour = (index: number): string => colours[index % colours.length] ?? '#7f7f7f'

const dash = (index: number): string => {
  const pattern = dashes[Math.floor(index / colours.length + index) % dashes.length] ?? ''
  return pattern === '' ? '' : ` stroke-dasharray="${pattern}"`
}

const label = (text: string, x: number, y: number, attributes: string): string =>
  `<text x="${round(x)}" y="${round(y)}"${attributes === '' ? '' : ` ${attributes}`}>${escapeXml(text)}</text>`

const round = (value: number): number => Math.round(value * 10) / 10
