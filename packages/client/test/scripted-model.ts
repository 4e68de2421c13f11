/**
 * An OpenAI-compatible server that does what it is asked for: `tokens=20 every=5 end=done`. A token is `<number> `. `end=cut`
 * breaks off behind the last one; `end=hang` says nothing more until its client leaves.
 */
import { once } from 'node:events'
import { createServer, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { setTimeout as delay } from 'node:timers/promises'

export interface ScriptedModel {
  readonly url: string
  /** How many were asked for, and how many were left by their client. */
  readonly counts: { asked: number; left: number }
  close(): Promise<void>
}

export const tokensOf = (count: number): string => Array.from({ length: count }, (_, i) => `${i + 1} `).join('')

export async function startScriptedModel(): Promise<ScriptedModel> {
  const counts = { asked: 0, left: 0 }
  const server = createServer((request, response) => {
    let body = ''
    request.setEncoding('utf8').on('data', (piece: string) => {
      body += piece
    })
    request.on('end', () => {
      counts.asked++
      response.on('close', () => {
        if (!response.writableFinished) counts.left++
      })
      const { messages } = JSON.parse(body) as { messages: { content: string }[] }
      void speak(messages.at(-1)?.content ?? '', response)
    })
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}/v1`,
    counts,
    close: async () => {
      server.closeAllConnections()
      server.close()
      await once(server, 'close')
    },
  }
}

async function speak(script: string, response: ServerResponse): Promise<void> {
  const said = (name: string, otherwise: string): string => new RegExp(`${name}=(\\w+)`).exec(script)?.[1] ?? otherwise
  const block = (delta: object, finish_reason: string | null): string => {
    const choices = [{ index: 0, delta, finish_reason }]
    return `data: ${JSON.stringify({ id: 'c', object: 'chat.completion.chunk', created: 1, model: 'm', choices })}\n\n`
  }
  response.writeHead(200, { 'content-type': 'text/event-stream' })
  for (let number = 1; number <= Number(said('tokens', '20')) && !response.destroyed; number++) {
    response.write(block({ content: `${number} ` }, null))
    await delay(Number(said('every', '2')))
  }
  if (said('end', 'done') === 'cut') response.destroy()
  if (said('end', 'done') !== 'done') return
  response.write(block({}, 'stop'))
  response.end('data: [DONE]\n\n')
}
