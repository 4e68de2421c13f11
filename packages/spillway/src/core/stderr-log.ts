/** The default log: warnings and errors as lines on stderr, errors with their stack and cause. */
import { faultText } from './fault-text.js'
import type { IntakeLog } from './settings.js'

function write(level: string, fields: object, message: string): void {
  const { err, ...rest } = fields as { err?: unknown }
  const facts = Object.keys(rest).length === 0 ? '' : ` ${JSON.stringify(rest)}`
  const fault = err === undefined ? '' : `\n${faultText(err)}`
  process.stderr.write(`${new Date().toISOString()} spillway ${level}: ${message}${facts}${fault}\n`)
}

export const stderrLog: IntakeLog = {
  debug: () => undefined,
  info: () => undefined,
  warn: (fields, message) => write('warn', fields, message),
  error: (fields, message) => write('error', fields, message),
}
