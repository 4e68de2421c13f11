/** Thousands of streams that have nothing to say, held open. */
import { StreamReader, type StreamSite, streamRequest } from './stream-reader.js'

export interface Holding {
  readonly to: StreamSite
  readonly count: number
  /** Of the users' names, one for each stream. */
  readonly users: string
}

export interface Held {
  readonly open: number
  readonly failed: number
  /** Comment lines that came since the last time. */
  readonly beats: number
}

const openingAtOnce = 100
const heartbeat = ':\n'

const readers: StreamReader[] = []
let open = 0
let failed = 0
let beats = 0
let refusal = ''

/** Answers when all of them have the head of their answer. */
export async function hold({ to, count, users }: Holding): Promise<Held> {
  let next = 0
  const openOne = (): Promise<void> =>
    new Promise((resolve) => {
      const request = streamRequest(to, { tokens: 0, every: 0 }, `${users}-${next++}`)
      const reader = new StreamReader(request, {
        onHead(status, head) {
          if (status === 200) open += 1
          else {
            failed += 1
            refusal = head.split('\r\n', 1)[0] ?? ''
          }
          resolve()
        },
        onText(text) {
          if (text === heartbeat) beats += 1
        },
        onClosed() {
          open -= 1
          resolve()
        },
      })
      readers.push(reader)
    })
  const line = async (): Promise<void> => {
    while (next < count) await openOne()
  }
  await Promise.all(Array.from({ length: openingAtOnce }, line))
  if (failed > 0) throw new Error(`${failed} of ${count} were refused: ${refusal}`)
  return held()
}

export function held(): Held {
  const counts = { open, failed, beats }
  beats = 0
  return counts
}

export function letGo(): Held {
  for (const reader of readers.splice(0)) reader.close()
  open = 0
  return held()
}
