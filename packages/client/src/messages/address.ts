/** `queue`, `queue/partition`, or both by name: for names with a slash in them. */
export type Address = string | { queue: string; partition?: string }

export function placeOf(address: Address): { queue: string; partition?: string } {
  if (typeof address !== 'string') return address
  const slash = address.indexOf('/')
  return slash === -1 ? { queue: address } : { queue: address.slice(0, slash), partition: address.slice(slash + 1) }
}
