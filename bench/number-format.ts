const thousands = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 })

/** Three significant digits and thousands separators: more would claim a certainty that no benchmark has. */
export function formatNumber(value: number): string {
  if (!Number.isFinite(value)) return String(value)
  const size = Math.abs(value)
  if (size >= 1_000) return thousands.format(Number(value.toPrecision(4)))
  if (size === 0) return '0'
  if (size < 0.001) return value.toPrecision(2)
  return String(Number(value.toPrecision(3)))
}

/** `12,300/s`, `1.2 ms`, `0.8 ×`. */
export function formatQuantity(value: number, unit: string): string {
  if (unit === '') return formatNumber(value)
  return unit.startsWith('/') || unit === '%' ? `${formatNumber(value)}${unit}` : `${formatNumber(value)} ${unit}`
}

/** `0:07`, `12:30`, `1:02:03`. */
export function formatDuration(seconds: number): string {
  const whole = Math.max(0, Math.round(seconds))
  const two = (n: number): string => String(n).padStart(2, '0')
  const minutes = Math.floor(whole / 60)
  if (minutes < 60) return `${minutes}:${two(whole % 60)}`
  return `${Math.floor(minutes / 60)}:${two(minutes % 60)}:${two(whole % 60)}`
}
