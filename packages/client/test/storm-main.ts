/** The storm in real time, over real connections: `node --import tsx packages/client/test/storm-main.ts`. Prints the histogram of arrivals. */
import { once } from 'node:events'
import { createServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import { systemClock } from '../src/clock.js'
import { drawn, histogram, storm, thirtySeconds } from './storm.js'

const coming = new Map<string, () => Response>()
const server = createServer((request, response) => {
  const answer = coming.get(request.url ?? '')?.() ?? new Response(null, { status: 404 })
  coming.delete(request.url ?? '')
  void answer.text().then((body) => response.writeHead(answer.status, Object.fromEntries(answer.headers)).end(body))
})
server.listen(0, '127.0.0.1')
await once(server, 'listening')
const origin = `http://127.0.0.1:${(server.address() as AddressInfo).port}`

const options = { ...thirtySeconds, hasManners: !process.argv.includes('--without-manners') }
let requests = 0
const seen = await storm(options, systemClock, (arrive) => {
  const path = `/${++requests}`
  coming.set(path, arrive)
  return fetch(origin + path)
})
server.closeAllConnections()
server.close()

console.log(drawn(histogram(seen)))
console.log(
  `${seen.sent} requests for ${seen.useful} useful ones (${(seen.sent / seen.useful).toFixed(2)}), ${seen.failed.length} failed, longest call ${(seen.longestMs / 1_000).toFixed(1)} s`,
)
process.exitCode = seen.failed.length > 0 || seen.sent > 2 * seen.useful ? 1 : 0
