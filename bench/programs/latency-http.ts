/**
 * Accept → completed as a client of the real server sees it: `http.request` on the server's own /demo/echo, through the
 * queue (`Prefer: respond-async, wait=10`), answered when it is done. `url` is the server's origin.
 */
import { Agent, request } from 'node:http'
import { OpenLoop, printReport, readTask } from './latency-load.js'

const task = readTask()
const loop = new OpenLoop(task)
const agent = new Agent({ keepAlive: true })
const target = new URL('/api/v1/operations', task.url)

function post(n: number): Promise<void> {
  const body = JSON.stringify({
    type: 'http.request',
    queue: 'latency',
    partition: String(n % task.lanes),
    payload: { url: `${task.url}/demo/echo`, body: { n, text: 'x'.repeat(80) } },
  })
  return new Promise((resolve, reject) => {
    const call = request(
      target,
      {
        method: 'POST',
        agent,
        headers: { 'content-type': 'application/json', prefer: 'respond-async, wait=10' },
      },
      (response) => {
        let text = ''
        response.setEncoding('utf8').on('data', (chunk: string) => {
          text += chunk
        })
        response.once('end', () => {
          const { statusCode = 0 } = response
          if (statusCode === 201) resolve(loop.completed(n))
          else if (statusCode === 429 || statusCode === 503) resolve(loop.refused(n))
          else reject(new Error(`submission ${n}: ${statusCode} ${text}`))
        })
      },
    )
    call.once('error', reject)
    call.end(body)
  })
}

const report = await loop.run(post)
agent.destroy()
printReport(report)
