/** `hint` is worth knowing and does not make the command fail. */
export interface Finding {
  readonly name: string
  readonly state: 'right' | 'hint' | 'wrong'
  readonly detail: string
  /** How to put it right. */
  readonly fix?: string
}
