/** The clients' process. It takes the load to offer over HTTP and answers with the results. */
import { createServer, type IncomingMessage } from 'node:http'
import type { AddressInfo } from 'node:net'
import { Step } from '../overload-generator.js'
import { given, type StepRequest } from '../overload-wire.js'

const downstream = given('DOWNSTREAM')
let last: { step: Step; first: number } | undefined

async function bodyOf(request: IncomingMessage): Promise<unknown> {
  let text = ''
  for await (const chunk of request) text += String(chunk)
  return JSON.parse(text)
}

async function answer(request: IncomingMessage): Promise<unknown> {
  switch (`${request.method} ${request.url}`) {
    case 'POST /step': {
      const asked = (await bodyOf(request)) as StepRequest
      const step = new Step(asked)
      last = { step, first: asked.first }
      return await step.run()
    }
    case 'GET /effects': {
      if (last === undefined) throw new Error('no step has run yet')
      const { step, first } = last
      const done = await fetch(`${downstream}/done?first=${first}&count=${step.count}`)
      return step.compare(new Uint8Array(await done.arrayBuffer()))
    }
    default:
      throw new Error(`unknown: ${request.method} ${request.url}`)
  }
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
server.listen(0, '127.0.0.1', () => {
  console.log(`listening on http://127.0.0.1:${(server.address() as AddressInfo).port}`)
})
process.once('SIGTERM', () => process.exit(0))
