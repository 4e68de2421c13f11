/** What is throttled together: a limit on petitions does not hold up messages. */
export type Service = 'operations' | 'petitions' | 'messages' | 'routing' | 'generation'

export interface Call {
  method: 'GET' | 'POST' | 'PUT' | 'DELETE'
  path: string
  query?: Readonly<Record<string, string | number | boolean | undefined>>
  body?: unknown
  headers?: Record<string, string>
  signal?: AbortSignal | undefined
  service: Service
  /** The member that makes a body the answer, or one of several; `[]`: it is a list; the empty one: there may be none. */
  expects: readonly string[]
  /** It does no harm if it is done twice, so that it is sent again when nobody knows what became of it. */
  isRepeatable: boolean
  /** For all attempts and pauses. Default: the client's. */
  deadlineMs?: number | undefined
  /** The server is asked to hold the answer back so long, at most. */
  waitMs?: number
  /** The answer is server-sent events, and is not read here. */
  isStream?: boolean
}

/** What an attempt is answered with. */
export interface Received {
  status: number
  headers: Headers
  /** Undefined where there is none: 204, 304, and streams. */
  body: unknown
  /** Of a stream. */
  stream: OpenStream | null
}

/** What a call is answered with. */
export interface Answer extends Received {
  /** An attempt before this one may have done it already: its answer was lost. */
  isRepeat: boolean
}

export interface OpenStream {
  body: ReadableStream<Uint8Array>
  /** Breaks the connection off. */
  close(): void
}

/** With all its attempts. Resolves for every 2xx and 304; rejects with a SpillwayError, or with the signal's reason. */
export type Send = (call: Call) => Promise<Answer>

/** What every method takes. */
export interface CallOptions {
  signal?: AbortSignal
  /** For all attempts and pauses. Default: the client's. */
  deadlineMs?: number
}

export const limitsOf = ({ signal, deadlineMs }: CallOptions): Pick<Call, 'signal' | 'deadlineMs'> => ({
  signal,
  deadlineMs,
})
