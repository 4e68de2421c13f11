/** The wire format of generated streams: OpenAI's form under `/v1`, and the native events. */

export const generationLimits = {
  queryCodePoints: 100_000,
  modelCodePoints: 255,
  providerCodePoints: 100,
  /** For `X-Thread-ID`. */
  threadIdCharacters: 255,
} as const

/** Header names, as they are written. */
export const streamIdHeader = 'X-Stream-Id'
export const threadIdHeader = 'X-Thread-ID'
export const resilienceLayerHeader = 'X-Resilience-Layer'

/** The value of `X-Resilience-Layer`: whether the generation started at once or was queued. */
export const resilienceLayers = { direct: '1-Direct', failover: '3-Queue-Failover' } as const
export type ResilienceLayer = (typeof resilienceLayers)[keyof typeof resilienceLayers]

/** Ends a stream of either form, after its last event; absent in OpenAI's form after a failure. */
export const doneText = '[DONE]'

/** OpenAI's error object. Its types are an open list; clients use the status and `code`. */
export interface OpenAiError {
  message: string
  type: string
  /** The invalid member, e.g. `messages[0].role`. */
  param: string | null
  code: string | null
}

/** The body of an error answer, and the last data of a failed stream. */
export interface OpenAiErrorBody {
  error: OpenAiError
}

export const streamStatuses = ['queued', 'started'] as const

/** `event: status` */
export interface StreamStatus {
  status: (typeof streamStatuses)[number]
  stream_id: string
  thread_id: string
}

/** `event: queued`: first when it is queued, then each time its position changes. */
export interface StreamQueued {
  /** 0: the next. */
  position: number
  eta_seconds: number
}

/** `event: chunk` */
export interface StreamChunk {
  content: string
  /** From 0 on. */
  chunk_index: number
  /** Null except on the last chunk. */
  finish_reason: string | null
}

/** `event: complete` */
export interface StreamComplete {
  thread_id: string
  chunk_count: number
  /** Code points of all content together. */
  total_length: number
  duration_ms: number
}

/** `event: error` */
export interface StreamError {
  message: string
  /** A problem code. */
  code: string
  /** Whether the same request may succeed if it is repeated. */
  retryable: boolean
}
