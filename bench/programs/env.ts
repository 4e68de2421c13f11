/** What a section hands to its program. A missing name is a mistake of the section, and throws. */
export function env(name: string): string {
  const value = process.env[name]
  if (value === undefined) throw new Error(`the environment variable ${name} is missing`)
  return value
}

export function envNumber(name: string): number {
  const value = Number(env(name))
  if (!Number.isFinite(value)) throw new Error(`the environment variable ${name} is no number: ${env(name)}`)
  return value
}
