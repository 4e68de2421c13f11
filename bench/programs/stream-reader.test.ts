import { createServer, type Server, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { afterEach, describe, expect, it } from 'vitest'
import { ChunkedBody, StreamReader, streamRequest } from './stream-reader.js'
import { endBlocks, scriptIn, scriptText, TokenScanner, tokenBlock } from './stream-tokens.js'

/** Every way to cut a text into two. */
const cuts = (text: string): [string, string][] =>
  Array.from({ length: text.length + 1 }, (_, at) => [text.slice(0, at), text.slice(at)])

describe('TokenScanner', () => {
  const scan = (...parts: string[]): [number, number][] => {
    const found: [number, number][] = []
    const scanner = new TokenScanner((number, sentMs) => found.push([number, sentMs]))
    for (const part of parts) scanner.feed(part)
    return found
  }

  it('finds each token with its time, wherever the text is cut', () => {
    const text = tokenBlock(9, 1.5) + tokenBlock(10, 12.25)
    for (const parts of cuts(text)) {
      expect(scan(...parts)).toEqual([
        [9, 1.5],
        [10, 12.25],
      ])
    }
  })

  it('finds nothing in an end', () => {
    expect(scan(endBlocks)).toEqual([])
  })
})

describe('ChunkedBody', () => {
  it('takes the framing off, wherever it is cut', () => {
    for (const parts of cuts('5\r\nhello\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n')) {
      const body = new ChunkedBody()
      expect(parts.map((part) => body.feed(part)).join('')).toBe('hello0123456789abcdef')
      expect(body.isOver).toBe(true)
    }
  })

  it('is not over before the last chunk', () => {
    const body = new ChunkedBody()
    body.feed('5\r\nhello\r\n')
    expect(body.isOver).toBe(false)
  })
})

describe('scriptIn', () => {
  it('finds what scriptText wrote in the body of a request', () => {
    const script = { tokens: 20, every: 50 }
    const { body = '' } = streamRequest({ origin: 'http://127.0.0.1:1', path: '/v1/chat/completions' }, script, 'a')
    expect(body).toContain(scriptText(script))
    expect(scriptIn(body)).toEqual(script)
  })
})

describe('StreamReader', () => {
  let server: Server | undefined

  afterEach(() => {
    server?.closeAllConnections()
    server?.close()
  })

  const read = (answer: (response: ServerResponse) => void) =>
    new Promise<{ status: number; tokens: number[]; isWhole: boolean }>((resolve) => {
      const made = createServer((_, response) => answer(response)).listen(0, '127.0.0.1', () => {
        const { port } = made.address() as AddressInfo
        let status = 0
        const tokens: number[] = []
        new StreamReader(
          { host: '127.0.0.1', port, path: '/' },
          {
            onHead: (code) => {
              status = code
            },
            onToken: (number) => tokens.push(number),
            onClosed: (isWhole) => resolve({ status, tokens, isWhole }),
          },
        )
      })
      server = made
    })

  it('reads a stream to its end', async () => {
    const found = await read((response) => {
      response.write(tokenBlock(1, 1))
      response.end(tokenBlock(2, 2) + endBlocks)
    })
    expect(found).toEqual({ status: 200, tokens: [1, 2], isWhole: true })
  })

  it('distinguishes a stream that broke off from one that ended', async () => {
    const found = await read((response) => {
      response.write(tokenBlock(1, 1), () => response.destroy())
    })
    expect(found).toEqual({ status: 200, tokens: [1], isWhole: false })
  })

  it('reports a refusal', async () => {
    const found = await read((response) => {
      response.writeHead(429, { 'content-length': 2 }).end('{}')
    })
    expect(found).toEqual({ status: 429, tokens: [], isWhole: false })
  })
})
