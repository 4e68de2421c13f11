/** Asks a program of ours to measure inside itself: see programs/measured.ts. */

export async function ask<T>(origin: string, measurement: string, query: Record<string, string | number>): Promise<T> {
  const parameters = new URLSearchParams(Object.entries(query).map(([name, value]) => [name, String(value)]))
  const answer = await fetch(`${origin}/measure/${measurement}?${parameters}`)
  if (!answer.ok) throw new Error(`${measurement} could not be measured: ${answer.status} ${await answer.text()}`)
  return (await answer.json()) as T
}
