import type { ConfigSource, LoadedConfig } from './load.js'
import type { Setting, SettingsTable } from './setting.js'
import { settings } from './settings.js'
import { allowedValues, type SettingValue, showValue } from './values.js'

export interface ConfigRow {
  readonly name: string
  /** Secrets and passwords are masked; empty = not set. */
  readonly value: string
  readonly unit: string
  readonly source: ConfigSource
  readonly default: string
  readonly allowed: string
  readonly meaning: string
}

/** One row per setting, in the order of the table: what `spillway config` prints. */
export function describeConfig({ config, sources }: LoadedConfig): ConfigRow[] {
  const table: SettingsTable = settings
  const values: Readonly<Record<string, Readonly<Record<string, SettingValue>> | boolean>> = config
  return Object.entries(table).flatMap(([group, rows]) =>
    Object.entries(rows).map(([key, setting]) => {
      const groupValues = values[group]
      const value = typeof groupValues === 'object' ? (groupValues[key] ?? null) : null
      return describeSetting(setting, value, sources.get(setting.name) ?? 'default')
    }),
  )
}

function describeSetting(setting: Setting, value: SettingValue, source: ConfigSource): ConfigRow {
  return {
    name: setting.name,
    value: showValue(setting, value),
    unit: setting.unit ?? '',
    source,
    default: showValue(setting, setting.default),
    allowed: allowedValues(setting),
    meaning: setting.meaning,
  }
}
