/** The form of a setting, and the type of its value. The settings of a workload are declared in its settings.ts. */

/** Common to all settings, whatever their type. */
interface Described {
  /** The environment variable. */
  readonly name: string
  /** A second name that is read when the first is not set. */
  readonly fallbackName?: string
  readonly meaning: string
  readonly unit?: string
  /** A secret is never shown: not in `spillway config`, not in an error. */
  readonly secret?: true
}

export type Setting = Described &
  (
    | {
        readonly type: 'integer' | 'number'
        readonly min: number
        readonly max: number
        readonly default: number | null
      }
    | { readonly type: 'boolean'; readonly default: boolean }
    | { readonly type: 'choice'; readonly choices: readonly string[]; readonly default: string }
    | { readonly type: 'choices'; readonly choices: readonly string[]; readonly default: readonly string[] }
    | {
        readonly type: 'text'
        readonly pattern: RegExp
        /** The pattern in words, for the error message. */
        readonly allowed: string
        readonly default: string | null
      }
    | {
        readonly type: 'url'
        readonly protocols: readonly string[]
        /** Paths are appended to it: no query, no fragment; trailing slashes are dropped. */
        readonly base?: true
        readonly default: string | null
      }
    | { readonly type: 'urls'; readonly protocols: readonly string[]; readonly default: readonly string[] | null }
    | { readonly type: 'origins'; readonly wildcard?: true; readonly default: readonly string[] | null }
    | { readonly type: 'hosts'; readonly default: readonly string[] }
    | { readonly type: 'networks'; readonly default: readonly string[] }
    | { readonly type: 'names'; readonly default: readonly string[] | null }
  )

export type SettingsTable = Readonly<Record<string, Readonly<Record<string, Setting>>>>

type Nullable<S, T> = S extends { readonly default: null } ? T | null : T

/** The type of a setting's parsed value, read off its row. */
type ValueOf<S> = S extends { readonly type: 'integer' | 'number' }
  ? Nullable<S, number>
  : S extends { readonly type: 'boolean' }
    ? boolean
    : S extends { readonly type: 'choice'; readonly choices: readonly (infer C)[] }
      ? C
      : S extends { readonly type: 'choices'; readonly choices: readonly (infer C)[] }
        ? readonly C[]
        : S extends { readonly type: 'origins' | 'hosts' | 'networks' | 'names' | 'urls' }
          ? Nullable<S, readonly string[]>
          : Nullable<S, string>

/** The values of one group. */
export type ValuesIn<Group extends SettingsTable[string]> = { readonly [K in keyof Group]: ValueOf<Group[K]> }

export type ValuesOf<T extends SettingsTable> = { readonly [G in keyof T]: ValuesIn<T[G]> }

/** Reports settings that contradict each other. The name to check first is at the front. */
export type Say = (names: readonly string[], message: string) => void
