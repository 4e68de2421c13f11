import type { LoadedConfig } from './load.js'
import type { SettingsTable } from './setting.js'
import { settings } from './settings.js'
import { allowedValues, type SettingValue, showValue } from './values.js'

/**
 * One row per setting, in the order of the table: what `spillway config` prints. Secrets and passwords are masked; an empty
 * value is not set.
 */
export function describeConfig({ config, sources }: LoadedConfig) {
  const table: SettingsTable = settings
  const values = config as unknown as Readonly<Record<string, Readonly<Record<string, SettingValue>>>>
  return Object.entries(table).flatMap(([group, rows]) =>
    Object.entries(rows).map(([key, setting]) => ({
      name: setting.name,
      value: showValue(setting, values[group]?.[key] ?? null),
      unit: setting.unit ?? '',
      source: sources.get(setting.name) ?? 'default',
      default: showValue(setting, setting.default),
      allowed: allowedValues(setting),
      meaning: setting.meaning,
    })),
  )
}
