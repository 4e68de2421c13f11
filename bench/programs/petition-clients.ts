/** The submitters' process. It takes the load to offer over HTTP and answers with the results. */
import { createServer, type IncomingMessage } from 'node:http'
import type { AddressInfo } from 'node:net'
import { type Offer, Offering } from './petition-offer.js'

async function offerOf(request: IncomingMessage): Promise<Offer> {
  let text = ''
  for await (const chunk of request) text += String(chunk)
  return JSON.parse(text) as Offer
}

const server = createServer((request, response) => {
  offerOf(request)
    .then((offer) => new Offering(offer).run())
    .then(
      (result) => response.writeHead(200, { 'content-type': 'application/json' }).end(JSON.stringify(result)),
      (fault: unknown) => {
        console.error(fault)
        response.writeHead(500).end(String(fault))
      },
    )
})
server.listen(0, '127.0.0.1', () => {
  console.log(`LISTENS http://127.0.0.1:${(server.address() as AddressInfo).port}`)
})
process.once('SIGTERM', () => process.exit(0))
