/** The readers' process. It takes commands over HTTP and answers with the results. */
import { createServer, type IncomingMessage } from 'node:http'
import type { AddressInfo } from 'node:net'
import { type Flow, flow } from './stream-flow.js'
import { type Holding, held, hold, letGo } from './stream-holding.js'
import { type Resuming, resume } from './stream-resuming.js'
import { type Burst, burst, type FirstBytes, firstBytes } from './stream-waiting.js'

const kinds: Readonly<Record<string, (asked: unknown) => Promise<object>>> = {
  '/flow': (asked) => flow(asked as Flow),
  '/hold': (asked) => hold(asked as Holding),
  '/held': async () => held(),
  '/let-go': async () => letGo(),
  '/first-bytes': (asked) => firstBytes(asked as FirstBytes),
  '/burst': (asked) => burst(asked as Burst),
  '/resume': (asked) => resume(asked as Resuming),
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
server.requestTimeout = 0
server.listen(0, '127.0.0.1', () => {
  console.log(`LISTENS http://127.0.0.1:${(server.address() as AddressInfo).port}`)
})
process.once('SIGTERM', () => process.exit(0))
