/** What tests of petitions say to a real server, and what they look at beside its answers: its tables and its metrics. */
import { createHash, randomUUID } from 'node:crypto'
import pg from 'pg'
import { expect } from 'vitest'
import { type Answer, get, post } from './server-process.js'

type Server = { origin: string }
type Headers = Record<string, string>

export const petitionsPath = '/api/v1/petition-submissions'
export const uuidForm = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/
/** RFC 3339, UTC, with milliseconds. */
export const instantForm = /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/
export const hashOf = (text: string): string => createHash('sha256').update(text, 'utf8').digest('hex')

/** A submission that is in order; of a submitter of its own, so that no test uses up another's quota. */
export const petition = (members: Record<string, unknown> = {}): Record<string, unknown> => ({
  type: 'GENERAL',
  text: 'Let the fountain run again.',
  submitter_id: randomUUID(),
  ...members,
})

export const submitPetition = (server: Server, members: Record<string, unknown> = {}, headers: Headers = {}) =>
  post(server, petitionsPath, petition(members), headers)

/** One that has to be taken; its id and who sent it. */
export async function received(server: Server, members: Record<string, unknown> = {}) {
  const submitter = randomUUID()
  const answer = await submitPetition(server, { submitter_id: submitter, ...members })
  expect(answer.status).toBe(201)
  return { id: String(answer.body.petition_id), submitter, answer }
}

export const readPetition = (server: Server, id: string, headers: Headers = {}) =>
  get(server, `${petitionsPath}/${id}`, headers)

export const transition = (server: Server, id: string, to: string, reason?: string) =>
  post(server, `${petitionsPath}/${id}/transitions`, { to, ...(reason !== undefined && { reason }) })

export const withdraw = (server: Server, id: string, requester: string, headers: Headers = {}) =>
  post(server, `${petitionsPath}/${id}/withdraw`, { requester_id: requester }, headers)

/** Every member of a problem document (docs/reference/errors.md), and the headers that go with it. */
export function expectProblem(answer: Answer, status: number, code: string): void {
  expect({ status: answer.status, code: answer.body.code }, answer.text).toEqual({ status, code })
  expect(answer.headers.get('content-type')).toBe('application/problem+json')
  expect(answer.body).toMatchObject({
    type: expect.stringMatching(/^(urn|https):/),
    title: expect.stringMatching(/./),
    status,
    detail: expect.stringMatching(/./),
    instance: expect.stringMatching(/^\/[^?]*$/),
    trace_id: expect.stringMatching(/^[0-9a-f]{32}$/),
  })
  expect(answer.headers.get('x-request-id')).toBe(answer.body.trace_id)
  const late = status === 429 || status === 503
  expect(answer.headers.get('retry-after')).toBe(late ? String(answer.body.retry_after_seconds) : null)
}

/** A plain connection to the server's database, and its notifications. */
export interface Tables {
  query<Row extends Record<string, unknown>>(text: string, values?: unknown[]): Promise<Row[]>
  /** The rows of every table that a submission may touch, as one text; of rates those that count something. */
  all(): Promise<string>
  /** The places that the gate counts as taken. */
  held(): Promise<number>
  /** What does not hold between the tables. */
  faults(): Promise<string[]>
  close(): Promise<void>
}

const touched = ['petitions', 'petition_states', 'petition_blocks', 'ledger', 'ops', 'idempotency', 'halts']

export function openTables(url: string): Tables {
  const pool = new pg.Pool({ connectionString: url, max: 1, options: '-c search_path=spillway' })
  pool.on('error', () => undefined)
  const query = async <Row extends Record<string, unknown>>(text: string, values: unknown[] = []) =>
    (await pool.query<Row>(text, values)).rows
  return {
    query,
    all: async () => {
      const parts = touched.map((name) => `SELECT '${name} ' || to_json(x)::text AS line FROM ${name} x`)
      const rows = await query<{ line: string }>(`${parts.join(' UNION ALL ')}
        UNION ALL SELECT 'rates ' || to_json(x)::text FROM rates x WHERE x.sums[cardinality(x.sums)] <> x.sums[1]
        UNION ALL SELECT 'gates ' || name || ' ' || held || ' ' || overflowing FROM gates ORDER BY line`)
      return rows.map(({ line }) => line).join('\n')
    },
    held: async () =>
      Number((await query<{ held: string }>(`SELECT held FROM gates WHERE name = 'petitions'`))[0]?.held),
    faults: async () => (await query<{ fault: string }>('SELECT fault FROM petitions_audit()')).map((row) => row.fault),
    close: () => pool.end(),
  }
}

/** The series whose names begin with `petition_`, as they are scraped. */
export async function petitionSeries(server: Server, headers: Headers = {}): Promise<string> {
  const { text } = await get(server, '/metrics', headers)
  return text
    .split('\n')
    .filter((line) => line.startsWith('petition_'))
    .join('\n')
}
