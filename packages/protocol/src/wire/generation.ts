/** What streams of generated text look like on the wire: OpenAI's form under `/v1`, and the native events. */

export const generationLimits = {
  queryCodePoints: 100_000,
  modelCodePoints: 255,
  providerCodePoints: 100,
  /** Of `X-Thread-ID`. */
  threadIdCharacters: 255,
} as const

/** Header names, as they are written. */
export const streamIdHeader = 'X-Stream-Id'
export const threadIdHeader = 'X-Thread-ID'
export const resilienceLayerHeader = 'X-Resilience-Layer'

/** The value of `X-Resilience-Layer`: whether the generation began at once, or had to wait for its turn. */
export const resilienceLayers = { direct: '1-Direct', failover: '3-Queue-Failover' } as const
export type ResilienceLayer = (typeof resilienceLayers)[keyof typeof resilienceLayers]

/** What ends a stream of either form, after its last event; not in OpenAI's when it failed. */
export const doneText = '[DONE]'

/** OpenAI's error object. Its types are an open list; its clients go by the status, and by `code`. */
export interface OpenAiError {
  message: string
  type: string
  /** The member that is wrong, as `messages[0].role`. */
  param: string | null
  code: string | null
}

/** A whole answer that is no success, and in a stream the data of its end. */
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

/** `event: queued`: first when it is queued, then each time its place changes. */
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
  /** Null but for the last. */
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
  /** Whether the same request may succeed if it is made again. */
  retryable: boolean
}
