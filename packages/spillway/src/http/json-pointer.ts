/** What is wrong with a request and where; `path` is a JSON pointer (RFC 6901), empty for the whole body. */
export interface RequestFault {
  path: string
  message: string
}

/** A caller's member name may be a megabyte long; the answer that points at it must not be. */
const pointerCharactersMax = 256

export function pointerStep(name: string | number): string {
  if (typeof name === 'number') return `/${name}`
  const escaped = name.includes('~') || name.includes('/') ? name.replaceAll('~', '~0').replaceAll('/', '~1') : name
  return `/${escaped}`
}

/** Shortens a pointer and removes what UTF-8 cannot express (the fault may be in the name itself). */
export function presentablePointer(pointer: string): string {
  const bounded = pointer.length > pointerCharactersMax ? `${pointer.slice(0, pointerCharactersMax)}…` : pointer
  return Buffer.from(bounded.replaceAll('\u0000', '\ufffd'), 'utf8').toString('utf8')
}
