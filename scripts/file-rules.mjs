/** Rules about files as such, whatever they say. Each takes a path relative to the root and the text. */

/** Where names, comments and texts are in plain words. Migrations and generated files are not edited. */
const isPlain = (file) =>
  /^(?:packages\/[^/]+\/(?:src|test)|bench|chaos|scripts|examples|docs|deploy)\/|^(?:README|CONTRIBUTING|ARCHITECTURE)\.md$/.test(
    file,
  ) && !/\/generated\/|\/sql\/tables\//.test(file)

/** Whole words in text, and parts of a camelCase name: `rateTold`, `toldProblem`. */
const retired =
  'told|tells|whoever|of late(?! [a-z]|\\)|\\.\\w)|anew|in vain|heeds?|errands?|parcels?|given up|comes along|all is well'
const capitalized = retired.replaceAll(/(^|\|)\w/g, (start) => start.toUpperCase())
const retiredWords = new RegExp(`(?:(?<![A-Za-z])(?:${retired})|(?:${capitalized}))(?![a-z])`)

const rules = [
  {
    applies: isPlain,
    pattern: retiredWords,
    message: 'a retired word; use the plain word of the field (report, status, again, retry, failed)',
  },
  {
    applies: () => true,
    pattern: /^(?:<{7}|>{7}) /,
    message: 'a conflict that is not resolved',
  },
  {
    applies: (file) => !file.endsWith('.md'),
    pattern: /\b(?:TODO|FIXME|XXX)\b/,
    message: 'unfinished work is finished or described in an issue, not marked in a comment',
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
    // `lib` is where applications of Next keep such files.
    applies: (file) =>
      !file.startsWith('examples/next') && /(^|\/)(utils?|helpers?|common|lib|misc)(\.\w+)?(\/|$)/.test(file),
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
