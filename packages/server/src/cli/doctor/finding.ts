/** `hint` is worth knowing but does not make the command fail. */
export interface Finding {
  readonly name: string
  readonly state: 'right' | 'hint' | 'wrong'
  readonly detail: string
  /** How to fix it. */
  readonly fix?: string
}

export const right = (name: string, detail: string): Finding => ({ name, state: 'right', detail })
export const hint = (name: string, detail: string, fix: string): Finding => ({ name, state: 'hint', detail, fix })
export const wrong = (name: string, detail: string, fix: string): Finding => ({ name, state: 'wrong', detail, fix })

export function codeOf(error: unknown): string {
  return error instanceof Error && 'code' in error && typeof error.code === 'string' ? error.code : String(error)
}
