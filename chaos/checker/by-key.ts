/** One operation of the run, as everybody names it. */
export const keyOf = (one: { lane: string; n: number }): string => `${one.lane}#${one.n}`

export function groupBy<T>(list: readonly T[], of: (item: T) => string): Map<string, T[]> {
  const groups = new Map<string, T[]>()
  for (const item of list) {
    const group = groups.get(of(item))
    if (group === undefined) groups.set(of(item), [item])
    else group.push(item)
  }
  return groups
}
