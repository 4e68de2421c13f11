/** `hint` is worth knowing but does not make the command fail. */
export interface Finding {
  readonly name: string
  readonly state: 'right' | 'hint' | 'wrong'
  readonly detail: string
  /** How to fix it. */
  readonly fix?: string
}
