/** The producers' and consumers' process. It takes commands over HTTP and answers with the results. */
import { createServer, type IncomingMessage } from 'node:http'
import type { AddressInfo } from 'node:net'
import { type Consumption, consume } from './message-consumers.js'
import { type Flow, flow } from './message-flow.js'
import { type Production, produce } from './message-producers.js'

const kinds: Readonly<Record<string, (asked: unknown) => Promise<object>>> = {
  '/consume': (asked) => consume(asked as Consumption),
  '/flow': (asked) => flow(asked as Flow),
  '/produce': (asked) => produce(asked as Production),
}

async function answer(request: IncomingMessage): Promise<object> {
  let text = ''
  for await (const chunk of request) text += String(chunk)
  const kind = kinds[request.url ?? '']
  if (kind === undefined) throw new Error(`nobody knows how to ${request.url}`)
  return kind(JSON.parse(text))
}

const server = createServer((request, response) => {
  answer(request).then(
    (result) => response.writeHead(200, { 'content-type': 'application/json' }).end(JSON.stringify(result)),
    (fault: unknown) => {
      console.error(fault)
      response.writeHead(500).end(String(fault))
    },
  )
})
// A run of ten minutes is one request.
server.requestTimeout = 0
server.listen(0, '127.0.0.1', () => {
  console.log(`LISTENS http://127.0.0.1:${(server.address() as AddressInfo).port}`)
})
process.once('SIGTERM', () => process.exit(0))
