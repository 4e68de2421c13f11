/** The unit of throttling: a limit on petitions does not hold up messages. */
export type Service = 'operations' | 'petitions' | 'messages' | 'routing' | 'generation' | 'routes'

export interface Call {
  method: 'GET' | 'POST' | 'PUT' | 'PATCH' | 'DELETE'
  path: string
  query?: Readonly<Record<string, string | number | boolean | undefined>>
  body?: unknown
  headers?: Record<string, string>
  signal?: AbortSignal | undefined
  service: Service
  /** Members that identify the expected body, any one of them; `'[]'`: a list; `''`: the body may be absent; `'*'`: any JSON, or none. */
  expects: readonly string[]
  /** Safe to do twice, so it is sent again when its outcome is unknown. */
  isRepeatable: boolean
  /** For all attempts and pauses. Default: the client's. */
  deadlineMs?: number | undefined
  /** The server is asked to hold the answer back for at most this long. */
  waitMs?: number
  /** The answer is a stream of server-sent events; it is not read here. */
  isStream?: boolean
}

/** The answer to one attempt. */
export interface Received {
  status: number
  headers: Headers
  /** Undefined without a body: 204, 304, and streams. */
  body: unknown
  /** Set for streams. */
  stream: OpenStream | null
}

/** The answer to a call. */
export interface Answer extends Received {
  /** An earlier attempt, whose answer was lost, may have done it already. */
  isRepeat: boolean
}

export interface OpenStream {
  body: ReadableStream<Uint8Array>
  /** Breaks the connection off. */
  close(): void
}

/** Sends with all attempts. Resolves for every 2xx and 304; rejects with a SpillwayError, or with the signal's reason. */
export type Send = (call: Call) => Promise<Answer>

/** Options of every method. */
export interface CallOptions {
  signal?: AbortSignal
  /** For all attempts and pauses. Default: the client's. */
  deadlineMs?: number
}

export const limitsOf = ({ signal, deadlineMs }: CallOptions): Pick<Call, 'signal' | 'deadlineMs'> => ({
  signal,
  deadlineMs,
})
