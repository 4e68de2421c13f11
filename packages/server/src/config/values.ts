import { isIP } from 'node:net'
import { limits } from '@spillway/protocol/wire'
import { maskedSecret, maskUrlPasswords } from './secrets.js'
import type { Setting } from './setting.js'

export type SettingValue = string | number | boolean | readonly string[] | null

/** undefined = not a valid value of this setting. Parsing never returns null. */
export function parseSetting(setting: Setting, text: string): SettingValue | undefined {
  switch (setting.type) {
    case 'integer':
      return /^-?\d+$/u.test(text) ? within(setting, Number(text)) : undefined
    case 'number':
      return /^-?(?:\d+\.?\d*|\.\d+)$/u.test(text) ? within(setting, Number(text)) : undefined
    case 'boolean':
      return text === 'true' ? true : text === 'false' ? false : undefined
    case 'choice':
      return setting.choices.includes(text) ? text : undefined
    case 'choices': {
      const chosen = [...new Set(splitList(text))]
      return chosen.length > 0 && chosen.every((one) => setting.choices.includes(one)) ? chosen : undefined
    }
    case 'text':
      return setting.pattern.test(text) ? text : undefined
    case 'url':
      return setting.base ? parseBaseUrl(text, setting.protocols) : parseUrl(text, setting.protocols)
    case 'urls': {
      const urls = parseEach(text, (one) => parseUrl(one, setting.protocols))
      return urls?.length === 0 ? undefined : urls
    }
    case 'origins':
      return parseEach(text, (one) => (one === '*' && setting.wildcard ? one : parseOrigin(one)))
    case 'hosts':
      return parseEach(text, parseHost)
    case 'networks':
      return parseEach(text, parseNetwork)
    case 'names': {
      const names = parseEach(text, (name) => ([...name].length <= limits.realmCodePoints ? name : undefined))
      return names?.length === 0 ? undefined : names
    }
  }
}

/** The allowed values, in words. */
export function allowedValues(setting: Setting): string {
  switch (setting.type) {
    case 'integer':
      return `a whole number from ${setting.min} to ${setting.max}${setting.unit ? ` (${setting.unit})` : ''}`
    case 'number':
      return `a number from ${setting.min} to ${setting.max}${setting.unit ? ` (${setting.unit})` : ''}`
    case 'boolean':
      return 'true or false'
    case 'choice':
      return `one of ${setting.choices.join(', ')}`
    case 'choices':
      return `one or more of ${setting.choices.join(', ')}, separated by commas`
    case 'text':
      return setting.allowed
    case 'url': {
      const starts = setting.protocols.map((protocol) => `${protocol}//`).join(' or ')
      return `a URL starting with ${starts}${setting.base ? ', without user, query and fragment' : ''}`
    }
    case 'urls':
      return `URLs starting with ${setting.protocols.map((protocol) => `${protocol}//`).join(' or ')}, separated by commas`
    case 'origins':
      return `origins such as https://example.com, separated by commas${setting.wildcard ? ', or *' : ''}`
    case 'hosts':
      return 'host names or IP addresses without a port, separated by commas'
    case 'networks':
      return 'IP addresses or networks such as 10.0.0.0/8, separated by commas'
    case 'names':
      return `names of up to ${limits.realmCodePoints} characters, separated by commas`
  }
}

/** A value as it may be shown to people: secrets and passwords inside URLs are hidden. */
export function showValue(setting: Setting, value: SettingValue): string {
  if (value === null) return ''
  if (setting.secret) return maskedSecret
  return maskUrlPasswords(typeof value === 'object' ? value.join(',') : String(value))
}

/** The text that did not parse. A malformed URL cannot be masked reliably, so it is not shown. */
export function showRejected(setting: Setting, text: string): string {
  if (setting.secret || setting.type === 'url' || setting.type === 'urls') return '(value not shown)'
  return JSON.stringify(maskUrlPasswords(text.length > 200 ? `${text.slice(0, 200)}…` : text))
}

/** `postgres://user@/db?host=/run/postgresql` (a socket, no host) is valid for libpq and pg, not for the URL standard. */
function parseUrl(text: string, protocols: readonly string[]): string | undefined {
  const standard = text.startsWith('postgres') ? text.replace('@/', '@socket/') : text
  return URL.canParse(standard) && protocols.includes(new URL(standard).protocol) ? text : undefined
}

/** No user in it: fetch refuses such URLs, and credentials have their own settings. */
function parseBaseUrl(text: string, protocols: readonly string[]): string | undefined {
  if (parseUrl(text, protocols) === undefined || /[?#]/u.test(text)) return undefined
  const { username, password } = new URL(text)
  return username === '' && password === '' ? text.replace(/\/+$/u, '') : undefined
}

function within(setting: { min: number; max: number }, value: number): number | undefined {
  return value >= setting.min && value <= setting.max ? value : undefined
}

function splitList(text: string): string[] {
  return text
    .split(',')
    .map((one) => one.trim())
    .filter((one) => one !== '')
}

function parseEach(text: string, parse: (one: string) => string | undefined): readonly string[] | undefined {
  const parsed: string[] = []
  for (const one of splitList(text)) {
    const value = parse(one)
    if (value === undefined) return undefined
    if (!parsed.includes(value)) parsed.push(value)
  }
  return parsed
}

function parseOrigin(text: string): string | undefined {
  if (!URL.canParse(text)) return undefined
  const url = new URL(text)
  const bare =
    url.pathname === '/' && url.search === '' && url.hash === '' && url.username === '' && url.password === ''
  return bare && (url.protocol === 'http:' || url.protocol === 'https:') ? url.origin : undefined
}

/** In the form that is compared: lower case, no brackets, no trailing dot. */
function parseHost(text: string): string | undefined {
  const name = text.toLowerCase().replace(/^\[(.*)\]$/u, '$1')
  if (isIP(name) !== 0) return name
  return hostName.test(name) ? name.replace(/\.$/u, '') : undefined
}

const hostName = /^(?=.{1,254}$)[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?)*\.?$/u

function parseNetwork(text: string): string | undefined {
  const [address = '', prefix, ...rest] = text.split('/')
  const family = isIP(address)
  if (family === 0 || rest.length > 0) return undefined
  if (prefix === undefined) return text
  return /^\d{1,3}$/u.test(prefix) && Number(prefix) <= (family === 4 ? 32 : 128) ? text : undefined
}
