/**
 * What hostile callers do to the server, each within a bounded number of sockets and time. Every attack says what it saw of the
 * answers; memory, health and honest callers are watched by the run (hostile.ts).
 */
import { connect, type Socket } from 'node:net'
import { setTimeout as delay } from 'node:timers/promises'

export interface Size {
  sockets: number
  letters: number
  /** Of messages, in all. */
  megabytes: number
  /** Requests on one socket. */
  pipelined: number
  holdMs: number
  /** For answers that nobody reads: longer than the server waits for a reader, in a full run. */
  unreadHoldMs: number
}

export interface Seen {
  figures: Record<string, number>
  findings: string[]
}

export interface Attack {
  name: string
  says(size: Size): string
  play(origin: string, size: Size): Promise<Seen>
}

const attacker = 'mallory'
const bigQueue = 'hostile-big'
const waitQueue = 'hostile-wait'
const letterBytes = 1_000_000
const messageBytes = 900_000
const traceBytes = 900_000
const traces = 60
const chatBytes = 16_000_000
const pushBytes = 8_000_000
const writeBytes = 65_536
const wholeMs = 60_000

/** Fills the store with what the lists, pops and traces of the attacks are about. */
export async function prepare(origin: string, size: Size): Promise<void> {
  const send = async (path: string, body: unknown): Promise<Record<string, unknown>> => {
    const answer = await fetch(`${origin}${path}`, {
      method: 'POST',
      headers: { 'content-type': 'application/json', 'x-user-id': attacker },
      body: JSON.stringify(body),
    })
    const text = await answer.text()
    if (!answer.ok) throw new Error(`${path} was answered with ${answer.status}: ${text.slice(0, 300)}`)
    return JSON.parse(text) as Record<string, unknown>
  }
  const url = `${origin}/demo/echo?fail=400`
  for (let i = 0; i < size.letters; i++) {
    await send('/api/v1/operations', {
      ...{ type: 'http.request', queue: `hostile-${i % 20}`, max_retries: 0 },
      payload: { url, body: 'x'.repeat(letterBytes) },
    })
  }
  const messages = Math.ceil((size.megabytes * 1_000_000) / messageBytes)
  let first: Record<string, unknown> | undefined
  for (let i = 0; i < messages; i++) {
    const items = [{ queue: bigQueue, partition: `p${i % 20}`, payload: 'y'.repeat(messageBytes) }]
    const [stored] = (await send('/api/v1/push', { items })) as unknown as Record<string, unknown>[]
    first ??= stored
  }
  for (let i = 0; i < traces; i++) {
    await send('/api/v1/traces', {
      ...{ partitionId: first?.partition_id, transactionId: first?.transaction_id, eventType: 'info' },
      data: { text: 'z'.repeat(traceBytes) },
    })
  }
  tracesPath = `/api/v1/traces/${String(first?.partition_id)}/${String(first?.transaction_id)}`
}

let tracesPath = '/api/v1/traces/none/none'

function open(origin: string): Promise<Socket> {
  const { hostname, port } = new URL(origin)
  return new Promise((resolve, reject) => {
    const socket = connect({ host: hostname, port: Number(port), allowHalfOpen: true })
    socket.once('connect', () => {
      // The server may end it at any moment: that is what is watched.
      socket.off('error', reject).on('error', () => undefined)
      resolve(socket)
    })
    socket.once('error', reject)
  })
}

function head(method: string, path: string, headers: Record<string, string> = {}): string {
  const lines = Object.entries({ host: '127.0.0.1', 'x-user-id': attacker, ...headers }).map(
    ([name, value]) => `${name}: ${value}`,
  )
  return `${method} ${path} HTTP/1.1\r\n${lines.join('\r\n')}\r\n\r\n`
}

/** Opens so many sockets, all of which send the same and never read a byte of the answer. */
async function unread(origin: string, count: number, holdMs: number, request: (i: number) => string): Promise<Seen> {
  const sockets: Socket[] = []
  let closed = 0
  try {
    for (let i = 0; i < count; i++) {
      const socket = await open(origin)
      socket.pause().once('close', () => closed++)
      socket.write(request(i))
      sockets.push(socket)
    }
    await delay(holdMs)
    // A paused socket hears nothing of its end: only a write does.
    for (const socket of sockets) socket.write('\r\n')
    await delay(200)
    return { figures: { sockets: count, closed_by_server: closed }, findings: [] }
  } finally {
    for (const socket of sockets) socket.destroy()
  }
}

/** Sends a body but for its end, at the pace of the socket; stops when an answer comes. */
async function stalled(origin: string, count: number, holdMs: number, upload: Upload): Promise<Seen> {
  const sockets: Socket[] = []
  const statuses = new Map<number, number>()
  let sent = 0
  const chunk = Buffer.alloc(writeBytes, 'a')
  const frame = upload.chunked
    ? Buffer.concat([Buffer.from(`${writeBytes.toString(16)}\r\n`), chunk, Buffer.from('\r\n')])
    : chunk
  try {
    for (let i = 0; i < count; i++) {
      const socket = await open(origin)
      sockets.push(socket)
      let left = upload.bytes - writeBytes
      let answered = false
      socket.once('data', (data) => {
        answered = true
        const status = Number(/^HTTP\/1\.1 (\d+)/.exec(data.toString('latin1'))?.[1] ?? 0)
        statuses.set(status, (statuses.get(status) ?? 0) + 1)
      })
      const pump = (): void => {
        while (left > 0 && !answered && !socket.destroyed) {
          left -= writeBytes
          sent += writeBytes
          if (!socket.write(frame)) return void socket.once('drain', pump)
        }
      }
      const length: Record<string, string> = upload.chunked
        ? { 'transfer-encoding': 'chunked' }
        : { 'content-length': String(upload.bytes) }
      socket.write(
        head('POST', upload.path, { 'content-type': 'application/json', 'x-user-id': upload.identity(i), ...length }),
      )
      pump()
    }
    await delay(holdMs)
    const refused = statuses.get(503) ?? 0
    const others = [...statuses].filter(([status]) => status !== 503)
    return {
      figures: { sockets: count, sent_mb: Math.round(sent / 1_000_000), refused },
      findings: others.map(([status, times]) => `${times} uploads without an end were answered with ${status}`),
    }
  } finally {
    for (const socket of sockets) socket.destroy()
  }
}

interface Upload {
  path: string
  bytes: number
  chunked: boolean
  identity(i: number): string
}

/** The status lines of what a socket is sent until `wanted` of them came, it is closed or the time is over. */
function statusLines(socket: Socket, wanted: number, timeoutMs: number): Promise<number[]> {
  return new Promise((resolve) => {
    const found: number[] = []
    let rest = ''
    const end = (): void => {
      clearTimeout(timer)
      resolve(found)
    }
    const timer = setTimeout(end, timeoutMs)
    socket.on('data', (data) => {
      rest += data.toString('latin1')
      for (const match of rest.matchAll(/HTTP\/1\.1 (\d{3}) [^\r]*\r\n/g)) found.push(Number(match[1]))
      // What may be the beginning of the next one.
      rest = rest.slice(rest.lastIndexOf('\n') + 1)
      if (rest.length > 64) rest = rest.slice(-64)
      if (found.length >= wanted) end()
    })
    socket.once('close', end)
    socket.once('end', end)
  })
}

async function pipelines(origin: string, { pipelined }: Size): Promise<Seen> {
  const sockets = 4
  const one = head('GET', '/v1/models')
  const began = performance.now()
  const answers = await Promise.all(
    Array.from({ length: sockets }, async () => {
      const socket = await open(origin)
      try {
        const seen = statusLines(socket, pipelined, wholeMs)
        socket.write(one.repeat(pipelined))
        return await seen
      } finally {
        socket.destroy()
      }
    }),
  )
  const all = answers.flat()
  const good = all.filter((status) => status === 200 || status === 429 || status === 503)
  const missing = sockets * pipelined - all.length
  return {
    figures: {
      sockets,
      requests: sockets * pipelined,
      answered: all.length,
      seconds: Math.round((performance.now() - began) / 100) / 10,
    },
    findings: [
      ...(missing > 0 ? [`${missing} of ${sockets * pipelined} pipelined requests were not answered`] : []),
      ...(good.length < all.length
        ? [`${all.length - good.length} pipelined requests were answered otherwise than 200, 429, 503`]
        : []),
    ],
  }
}

/** Everybody who sends a request and then a FIN gets the answer; who only waits takes nothing. */
async function halfCloses(origin: string, { sockets: count, holdMs }: Size): Promise<Seen> {
  const body = JSON.stringify({ items: [{ queue: 'hostile-half', payload: 1 }] })
  const request =
    head('POST', '/api/v1/push', { 'content-type': 'application/json', 'content-length': String(body.length) }) + body
  const pushed: (number | null)[] = []
  for (const endsAt = Date.now() + holdMs; Date.now() < endsAt; ) {
    pushed.push(...(await Promise.all(Array.from({ length: count }, () => halfClosed(origin, request, 10_000)))))
  }
  const unanswered = pushed.filter((status) => status === null).length
  const waiting = head('GET', `/api/v1/pop/queue/${waitQueue}?wait=true&timeout=30000`)
  const waited = await Promise.all(
    Array.from({ length: Math.min(50, count) }, () => halfClosed(origin, waiting, 5_000)),
  )
  const stored = await fetch(`${origin}/api/v1/push`, {
    method: 'POST',
    headers: { 'content-type': 'application/json', 'x-user-id': attacker },
    body: JSON.stringify({ items: [{ queue: waitQueue, payload: 'for who is left' }] }),
  })
  await stored.arrayBuffer()
  const popped = await fetch(`${origin}/api/v1/pop/queue/${waitQueue}?wait=true&timeout=2000`, {
    headers: { 'x-user-id': attacker },
  })
  await popped.arrayBuffer()
  const taken = waited.filter((status) => status === 200).length
  return {
    figures: { pushes: pushed.length, answered: pushed.length - unanswered, waiting: waited.length },
    findings: [
      ...(unanswered > 0 ? [`${unanswered} of ${pushed.length} pushes with a FIN behind them were not answered`] : []),
      ...(taken > 0 ? [`${taken} waiting pops with a FIN behind them took a message`] : []),
      ...(popped.status !== 200 ? ['a waiting pop whose client had gone took the message'] : []),
    ],
  }
}

async function halfClosed(origin: string, request: string, timeoutMs: number): Promise<number | null> {
  const socket = await open(origin)
  try {
    const seen = statusLines(socket, 1, timeoutMs)
    socket.end(request)
    return (await seen)[0] ?? null
  } finally {
    socket.destroy()
  }
}

async function slowHeaders(origin: string, { sockets: count, holdMs }: Size): Promise<Seen> {
  const sockets: Socket[] = []
  try {
    for (let i = 0; i < count; i++) {
      const socket = await open(origin)
      socket.resume().write('GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: ')
      sockets.push(socket)
    }
    for (const endsAt = Date.now() + holdMs; Date.now() < endsAt; ) {
      for (const socket of sockets) if (socket.writable) socket.write('a')
      await delay(100)
    }
    return { figures: { sockets: count }, findings: [] }
  } finally {
    for (const socket of sockets) socket.destroy()
  }
}

export const attacks: readonly Attack[] = [
  {
    name: 'unread dead letters',
    says: ({ sockets }) => `${sockets} sockets ask for a list of dead letters of 1 MB and do not read it`,
    play: (origin, { sockets, unreadHoldMs }) =>
      unread(origin, sockets, unreadHoldMs, () => head('GET', '/api/v1/dead-letters?limit=200')),
  },
  {
    name: 'unread pops',
    says: ({ sockets }) =>
      `${sockets} sockets pop messages of 0.9 MB, each as a consumer group of its own, and do not read them`,
    play: (origin, { sockets, unreadHoldMs }) =>
      unread(origin, sockets, unreadHoldMs, (i) =>
        head('GET', `/api/v1/pop/queue/${bigQueue}?batch=200&partitions=20&consumerGroup=g${process.pid}-${i}`),
      ),
  },
  {
    name: 'unread traces',
    says: ({ sockets }) =>
      `${sockets} sockets ask for the ${traces} traces of 0.9 MB of a message and do not read them`,
    play: (origin, { sockets, unreadHoldMs }) => unread(origin, sockets, unreadHoldMs, () => head('GET', tracesPath)),
  },
  {
    name: 'unread pipelines',
    says: ({ sockets }) => `${sockets} sockets ask for the API description 1,000 times each, and do not read it`,
    play: (origin, { sockets, unreadHoldMs }) =>
      unread(origin, sockets, unreadHoldMs, () => head('GET', '/openapi.json').repeat(1_000)),
  },
  {
    name: 'stalled uploads',
    says: ({ sockets }) => `${sockets} sockets of 20 identities upload chat requests of 16 MB but for their end`,
    play: (origin, { sockets, holdMs }) =>
      stalled(origin, sockets, holdMs, {
        ...{ path: '/v1/chat/completions', bytes: chatBytes, chunked: false },
        identity: (i) => `${attacker}-${i % 20}`,
      }),
  },
  {
    name: 'stalled chunked uploads',
    says: ({ sockets }) => `${sockets} sockets of 20 identities push 8 MB in chunks but for their end`,
    play: (origin, { sockets, holdMs }) =>
      stalled(origin, sockets, holdMs, {
        ...{ path: '/api/v1/push', bytes: pushBytes, chunked: true },
        identity: (i) => `${attacker}-${i % 20}`,
      }),
  },
  {
    name: 'pipelines',
    says: ({ pipelined }) => `4 sockets send ${pipelined} requests each at once, and read the answers`,
    play: pipelines,
  },
  {
    name: 'half-closes',
    says: ({ sockets }) => `pushes, ${sockets} at a time, and 50 waiting pops, each followed by a FIN`,
    play: halfCloses,
  },
  {
    name: 'slow headers',
    says: ({ sockets }) => `${sockets} sockets send a byte of a header every 100 ms`,
    play: slowHeaders,
  },
]
