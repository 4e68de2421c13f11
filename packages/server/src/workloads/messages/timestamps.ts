import { ProblemError } from 'spillway/workload'

/** The range that PostgreSQL and a four-digit year can both express; a time zone offset may leave it. */
const earliest = new Date('0001-01-01T00:00:00Z')
const latest = new Date('9999-12-31T23:59:59.999Z')

/** For a text with the form of a timestamp. A leap second has that form, but a Date cannot express it. */
export function instant(name: string, text: string): Date {
  const date = new Date(text)
  if (!(date >= earliest && date <= latest)) throw invalid(name, 'is not a point in time from the years 1 to 9999')
  return date
}

export const instantOrNull = (name: string, text: string | null | undefined): Date | null =>
  text === undefined || text === null ? null : instant(name, text)

/** `name` is the wrong member; empty: the request as a whole. */
export function invalid(name: string, message: string, detail = 'The request is not valid.'): ProblemError {
  return new ProblemError({
    code: 'invalid_request',
    detail,
    errors: [{ path: name === '' ? '' : `/${name}`, message }],
  })
}
