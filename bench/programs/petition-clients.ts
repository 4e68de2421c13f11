/** The submitters' process. It is told over HTTP what load to offer, and answers with what became of it. */
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
      (told) => response.writeHead(200, { 'content-type': 'application/json' }).end(JSON.stringify(told)),
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
