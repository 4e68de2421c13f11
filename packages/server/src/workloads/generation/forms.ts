/** Stream formats: which text a chunk has in the log, and what goes on the wire. */
import { doneText, type StreamStatus } from '@spillway/protocol/wire'
import type { EndKind, StreamRecord } from 'spillway/workload'
import type { Failure, Format } from './request.js'
import type { UpstreamChunk } from './upstream.js'

export interface Totals {
  threadId: string
  chunks: number
  characters: number
  durationMs: number
}

interface Form {
  /** The text of a chunk for the log; null if it has nothing for a reader. */
  chunk(chunk: UpstreamChunk, index: number): string | null
  done(totals: Totals): string
  failed(failure: Failure): string
  /** The block of a chunk. `id` null: not in the log. */
  block(text: string, id: number): string
  end(kind: EndKind, text: string, id: number | null): string
  queued(position: number, etaSeconds: number): string
  status(status: StreamStatus): string
}

const openai: Form = {
  chunk: ({ text }) => text,
  done: () => doneText,
  failed: ({ error }) => JSON.stringify({ error }),
  block: (text, id) => `id: ${id}\ndata: ${text}\n\n`,
  // No [DONE] after an error: OpenAI's clients would take the stream for complete.
  end: (_kind, text, id) => (id === null ? `data: ${text}\n\n` : `id: ${id}\ndata: ${text}\n\n`),
  // A comment and one newline: a blank line would end a block without data, which crashes OpenAI's decoders.
  queued: (position, etaSeconds) => `: queued position=${position} eta_seconds=${etaSeconds}\n`,
  status: ({ status }) => `: ${status}\n`,
}

const native: Form = {
  chunk: ({ content, finishReason }, index) =>
    content === '' && finishReason === null
      ? null
      : JSON.stringify({ content, chunk_index: index, finish_reason: finishReason }),
  done: ({ threadId, chunks, characters, durationMs }) =>
    JSON.stringify({
      thread_id: threadId,
      chunk_count: chunks,
      total_length: characters,
      duration_ms: Math.round(durationMs),
    }),
  failed: ({ error, retryable }) => JSON.stringify({ message: error.message, code: error.code, retryable }),
  block: (text, id) => `id: ${id}\nevent: chunk\ndata: ${text}\n\n`,
  end: (kind, text, id) =>
    `${id === null ? '' : `id: ${id}\n`}event: ${kind === 'done' ? 'complete' : 'error'}\ndata: ${text}\n\ndata: ${doneText}\n\n`,
  queued: (position, etaSeconds) => `event: queued\ndata: ${JSON.stringify({ position, eta_seconds: etaSeconds })}\n\n`,
  status: (status) => `event: status\ndata: ${JSON.stringify(status)}\n\n`,
}

export const forms: Readonly<Record<Format, Form>> = { openai, native }

/** The blocks of a record as one text. */
export function blocksOf(format: Format, record: StreamRecord): string {
  const form = forms[format]
  const { chunks, first, end } = record
  const plain = end === null ? chunks.length : chunks.length - 1
  let text = ''
  for (let i = 0; i < plain; i++) text += form.block(chunks[i] ?? '', first + i)
  if (end !== null) text += form.end(end, chunks[plain] ?? '', first + plain)
  return text
}
