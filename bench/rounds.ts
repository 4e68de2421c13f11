/** Variants that take turns: whatever the machine does meanwhile, it does to all of them. */

export interface Variant<T> {
  readonly name: string
  run(): Promise<T>
}

/** The order of a round: the next one begins each time, so that none always follows the same neighbour's dirt. */
export function rotated<T>(items: readonly T[], round: number): T[] {
  const start = items.length === 0 ? 0 : round % items.length
  return [...items.slice(start), ...items.slice(0, start)]
}

/** All variants once per round; the results of each by name, in the order of the rounds. */
export async function interleave<T>(
  variants: readonly Variant<T>[],
  rounds: number,
  onRound: (round: number) => void,
): Promise<ReadonlyMap<string, readonly T[]>> {
  const results = new Map<string, T[]>(variants.map(({ name }) => [name, []]))
  for (let round = 0; round < rounds; round++) {
    onRound(round)
    for (const variant of rotated(variants, round)) results.get(variant.name)?.push(await variant.run())
  }
  return results
}

/** What one variant gave; asking for one that was not measured is a defect of the section. */
export function of<T>(results: ReadonlyMap<string, readonly T[]>, name: string): readonly T[] {
  const found = results.get(name)
  if (found === undefined) throw new Error(`there is no variant ${name}`)
  return found
}
