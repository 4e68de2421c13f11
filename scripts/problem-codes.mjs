/** The problem codes as the source declares them and as docs/reference/errors.md documents them. */

/** `{ code: { status, title } }` from packages/protocol/src/wire/codes.ts. */
export function declaredCodes(source) {
  const body = /export const problems = \{([\s\S]*?)\n\} as const/.exec(source)?.[1] ?? ''
  const entry = /^\s*(\w+):\s*\{\s*status:\s*(\d+),\s*title:\s*(?:'([^']*)'|"([^"]*)"),?\s*\}/gm
  return Object.fromEntries(
    [...body.matchAll(entry)].map(([, code, status, single, double]) => [
      code,
      { status: Number(status), title: single ?? double },
    ]),
  )
}

/** The same from the table rows: | `code` | status | title | meaning | what to do |. */
export function documentedCodes(markdown) {
  const row = /^\|\s*`(\w+)`\s*\|\s*(\d{3})\s*\|\s*([^|]+?)\s*\|\s*([^|]*?)\s*\|\s*([^|]*?)\s*\|\s*$/gm
  return Object.fromEntries(
    [...markdown.matchAll(row)].map(([, code, status, title, meaning, remedy]) => [
      code,
      { status: Number(status), title, meaning, remedy },
    ]),
  )
}

export function codeFaults(declared, documented) {
  const faults = []
  if (Object.keys(declared).length === 0) faults.push('no codes found in the source')
  for (const [code, { status, title }] of Object.entries(declared)) {
    const entry = documented[code]
    if (!entry) faults.push(`${code} is not documented`)
    else if (entry.status !== status || entry.title !== title) {
      faults.push(`${code} is documented as ${entry.status} "${entry.title}", but is ${status} "${title}"`)
    } else if (!entry.meaning || !entry.remedy) faults.push(`${code} lacks its meaning or what to do`)
  }
  for (const code of Object.keys(documented)) {
    if (!declared[code]) faults.push(`${code} is documented but does not exist`)
  }
  return faults
}
