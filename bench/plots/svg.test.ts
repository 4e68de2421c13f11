import { describe, expect, it } from 'vitest'
import type { Plot } from '../section.js'
import { linearScale, logScale } from './scale.js'
import { renderPlot } from './svg.js'
import { shortNumber, textWidth, wrapText } from './text.js'

const bars: Plot = {
  name: 'accept',
  title: 'Accepting',
  xLabel: '',
  yLabel: 'requests per second',
  kind: 'bars',
  series: [
    { name: 'bare <echo> & more', points: [[0, 12_000]] },
    { name: 'Spillway', points: [[0, 9_000]] },
  ],
}

const lines: Plot = {
  name: 'overload',
  title:
    'Goodput over what is offered, with a title that is so long that it cannot possibly stand in one line of a plot',
  xLabel: 'offered per second',
  yLabel: 'answered per second',
  kind: 'lines',
  logX: true,
  series: Array.from({ length: 12 }, (_, n) => ({
    name: `a variant with quite a long name, number ${n}`,
    points: [
      [500, 480 + n],
      [10_000, 900 + n],
    ] as const,
  })),
}

interface Placed {
  x: number
  y: number
  text: string
  anchor: string
}

/** Every text of a plot with its place, as read back from the file. */
function texts(svg: string): Placed[] {
  return [...svg.matchAll(/<text x="([\d.-]+)" y="([\d.-]+)"([^>]*)>([^<]*)<\/text>/g)].map((match) => ({
    x: Number(match[1]),
    y: Number(match[2]),
    text: (match[4] ?? '').replaceAll('&lt;', '<').replaceAll('&gt;', '>').replaceAll('&amp;', '&'),
    anchor: /text-anchor="(\w+)"/.exec(match[3] ?? '')?.[1] ?? 'start',
  }))
}

const sizeOf = (svg: string) => {
  const [, width, height] = /viewBox="0 0 (\d+) ([\d.]+)"/.exec(svg) ?? []
  return { width: Number(width), height: Number(height) }
}

describe('renderPlot', () => {
  it.each([bars, lines])('clips no text: $kind', (plot) => {
    const svg = renderPlot(plot)
    const { width, height } = sizeOf(svg)
    const found = texts(svg)
    expect(found.length).toBeGreaterThan(plot.series.length)
    for (const { x, y, text, anchor } of found) {
      const wide = textWidth(text, 13)
      const left = anchor === 'end' ? x - wide : anchor === 'middle' ? x - wide / 2 : x
      expect(left, text).toBeGreaterThanOrEqual(0)
      expect(left + wide, text).toBeLessThanOrEqual(width)
      expect(y, text).toBeGreaterThan(0)
      expect(y, text).toBeLessThan(height)
    }
  })

  it('escapes what XML reserves', () => {
    const svg = renderPlot(bars)
    expect(svg).toContain('bare &lt;echo&gt; &amp; more')
    expect(svg).not.toContain('<echo>')
  })

  it('draws bars as long as their values are large', () => {
    const lengths = [...renderPlot(bars).matchAll(/<rect x="[\d.]+" y="[\d.]+" width="([\d.]+)"/g)].map((m) =>
      Number(m[1]),
    )
    expect((lengths[1] ?? 0) / (lengths[0] ?? 1)).toBeCloseTo(0.75, 2)
  })

  it('draws one curve for each series, with all its points', () => {
    const curves = [...renderPlot(lines).matchAll(/<polyline points="([^"]+)"/g)]
    expect(curves).toHaveLength(12)
    expect(curves[0]?.[1]?.split(' ')).toHaveLength(2)
  })

  it('names every series of a plot of lines', () => {
    const found = texts(renderPlot(lines)).map(({ text }) => text)
    for (const { name } of lines.series) expect(found).toContain(name)
  })

  it('has colours for dark pages too', () => {
    expect(renderPlot(bars)).toContain('prefers-color-scheme: dark')
  })
})

describe('scales', () => {
  it('begin at zero and end at a round number at or above the largest', () => {
    const scale = linearScale([120, 9_300])
    expect(scale.ticks[0]).toBe(0)
    expect(scale.ticks.at(-1)).toBe(10_000)
    expect(scale.at(0)).toBe(0)
    expect(scale.at(10_000)).toBe(1)
  })

  it('have room for negative values', () => {
    const scale = linearScale([-3, 5])
    expect(scale.at(-3)).toBeGreaterThanOrEqual(0)
    expect(scale.at(-3)).toBeLessThan(scale.at(0))
  })

  it('survive values that are all zero', () => {
    expect(linearScale([0, 0]).at(0)).toBe(0)
  })

  it('count in powers of ten on a logarithmic axis, and leave no empty decade', () => {
    const scale = logScale([500, 1_000_000])
    expect(scale.ticks).toEqual([1_000, 10_000, 100_000, 1_000_000])
    expect(scale.at(500)).toBe(0)
    expect(scale.at(1_000_000)).toBe(1)
  })

  it('have ticks between the powers of ten where there are few of them', () => {
    expect(logScale([700, 10_000]).ticks).toEqual([500, 1_000, 2_000, 5_000, 10_000])
    expect(logScale([3, 3]).ticks).toEqual([2, 5])
  })

  it('have no logarithm of zero', () => {
    expect(() => logScale([0, 10])).toThrow(RangeError)
  })
})

describe('text', () => {
  it('is broken between words, and loses none', () => {
    const broken = wrapText('one two three four', 60, 13)
    expect(broken.length).toBeGreaterThan(1)
    expect(broken.join(' ')).toBe('one two three four')
    expect(wrapText('incomprehensibilities', 10, 13)).toEqual(['incomprehensibilities'])
  })

  it.each([
    [0.25, '0.25'],
    [5_000, '5000'],
    [25_000, '25k'],
    [1_500_000, '1.5M'],
  ])('%s is %s at a tick', (value, text) => {
    expect(shortNumber(value)).toBe(text)
  })
})
