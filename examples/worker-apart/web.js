/** Accepts and never runs, so that it stays quick: every answer is a ticket. */
import { createServer } from 'node:http'
import { openIntake } from './work.js'

const { intake, resize } = await openIntake('accept')
const accept = intake.node(resize)
const tickets = intake.nodeTickets()
const server = createServer((request, response) => {
  tickets(request, response, () => {
    if (request.url === '/images') accept(request, response)
    else response.writeHead(404).end()
  })
})
server.listen(Number(process.env.PORT ?? 3000), '127.0.0.1', () => {
  process.send?.({ port: server.address().port })
})
process.once('SIGTERM', async () => {
  await intake.close()
  server.close()
  process.disconnect?.()
})
