/** Rules about files as such, whatever they say. Each takes a path relative to the root and the text. */

const sourceLinesMax = 600

const rules = [
  {
    applies: (file) => /^packages\/[^/]+\/src\//.test(file) && !file.includes('/generated/'),
    fault: (text) => {
      const lines = text.split('\n').length - (text.endsWith('\n') ? 1 : 0)
      return lines > sourceLinesMax ? `${lines} lines; ${sourceLinesMax} at most` : undefined
    },
  },
  {
    applies: (file) => !file.endsWith('.md'),
    pattern: /\b(?:TODO|FIXME|XXX)\b/,
    message: 'unfinished work is finished or told in an issue, not marked in a comment',
  },
  {
    applies: (file) => /\.test\.[mc]?[jt]sx?$/.test(file),
    pattern: /\b(?:it|test|describe|suite)(?:\.\w+)*\.(?:only|skip|todo)\b|\b[fx](?:it|describe)\s*\(/,
    message: 'a test is neither skipped nor run alone',
  },
  {
    applies: (file) => file.endsWith('package-lock.json'),
    pattern: /"resolved": "https?:/,
    message: 'the lockfile names no host',
  },
  {
    applies: () => true,
    pattern: /(?<![\w.:/-])\/(?:home|Users|root|work)\/[\w.-]+|\b[A-Z]:\\Users\\/,
    message: 'a path of one particular machine',
  },
  {
    applies: (file) => /(^|\/)(utils?|helpers?|common|lib|misc)(\.\w+)?(\/|$)/.test(file),
    fault: () => 'a name that says nothing; name the file for what it does',
  },
]

/** What these rules and their tests contain because they speak of it. */
const speaksOfTheRules = /^scripts\/file-rules(\.test)?\.mjs$/

/** Faults of one file as `{ file, line, message }`. */
export function fileFaults(file, text) {
  if (speaksOfTheRules.test(file)) return []
  const faults = []
  for (const { applies, pattern, message, fault } of rules) {
    if (!applies(file)) continue
    if (fault) {
      const found = fault(text)
      if (found) faults.push({ file, line: 1, message: found })
      continue
    }
    text.split('\n').forEach((line, index) => {
      if (pattern.test(line)) faults.push({ file, line: index + 1, message })
    })
  }
  return faults
}
