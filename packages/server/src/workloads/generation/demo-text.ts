/** The demo model's text depends on the request body only. */
import { createHash } from 'node:crypto'

export interface DemoAnswer {
  /** Generated on demand: an answer of 100,000 words is never in memory as a whole. */
  tokens(): Generator<string, undefined>
  tokenCount: number
  promptTokens: number
  finishReason: 'stop' | 'length'
}

const wordsMax = 100_000
const quotedWordsMax = 8
const quotedWordCharactersMax = 24
const sentencesUnlessAsked = 4
const sentencesPerParagraph = 5

const introduction =
  'I am the demo model of Spillway: nothing thinks behind these words, yet they are streamed, queued and resumed like any other answer.'

const stock = [
  'Each word you see is one token, sent at a steady pace.',
  'If all places are taken, a request waits in a queue instead of being turned away, and streams from there.',
  'Every token is in a log before it is sent, so a reader who lost the connection can go on where it stopped.',
  'A reader who leaves for good frees the place for somebody else.',
  'Slow readers cost nothing, because the log is read only as fast as they are.',
  'The same question brings the same answer, which makes it easy to see whether a token is missing.',
  'Ask me for 500 words to watch a longer stream.',
  'To hear a real model, tell the server where one listens and ask again.',
  'No user can fill the queue alone: waiting users are served in turn.',
  'Should the process that writes this answer die, you get an error instead of waiting in silence.',
  'An answer has a beginning and an end, and the end is written down like every other part of it.',
  'Overload is a question of order: what cannot run now runs next.',
].map((sentence) => sentence.split(' '))

type Members = Readonly<Record<string, unknown>>

function textOf(content: unknown): string {
  if (typeof content === 'string') return content
  if (!Array.isArray(content)) return ''
  return content.map((part: unknown) => textOf(Object(part).text)).join(' ')
}

function messagesOf(body: Members): { role: unknown; text: string }[] {
  if (!Array.isArray(body.messages)) return []
  return body.messages.map((message: unknown) => ({
    role: Object(message).role,
    text: textOf(Object(message).content),
  }))
}

/** Counts without a list of words: a prompt may have ten million characters. */
function wordCount(text: string): number {
  let count = 0
  for (const _ of text.matchAll(/\S+/g)) count++
  return count
}

function firstWords(question: string): string {
  const words = question.slice(0, 1_000).match(/\S+/g) ?? []
  const quoted = words.slice(0, quotedWordsMax).map((word) => [...word].slice(0, quotedWordCharactersMax).join(''))
  return quoted.join(' ') + (words.length > quotedWordsMax ? ' …' : '')
}

/** From "write 1,500 words", "in 200 tokens" and the like. */
function wordsAskedFor(question: string): number | null {
  const asked = /\b(\d{1,3}(?:,\d{3})+|\d{1,9})[\s-]+(?:words?|tokens?)\b/i.exec(question)?.[1]
  if (asked === undefined) return null
  return Math.min(Math.max(Number(asked.replaceAll(',', '')), 1), wordsMax)
}

function opening(question: string): string[] {
  const words = firstWords(question)
  const asked = words === '' ? 'You have asked nothing yet.' : `You asked: “${words}”`
  return `${introduction} ${asked}`.split(' ')
}

function* wordsOf(question: string): Generator<string, undefined> {
  let isFirst = true
  for (const word of opening(question)) {
    yield isFirst ? word : ` ${word}`
    isFirst = false
  }
  const digest = createHash('sha256').update(question).digest()
  const start = digest.readUInt8(0) % stock.length
  // With a stock of twelve, a stride of 1, 5, 7 or 11 reaches every sentence.
  const stride = [1, 5, 7, 11][digest.readUInt8(1) % 4] ?? 1
  for (let number = 0; ; number++) {
    const sentence = stock[(start + number * stride) % stock.length] ?? []
    const gap = number > 0 && number % sentencesPerParagraph === 0 ? '\n\n' : ' '
    for (const [at, word] of sentence.entries()) yield `${at === 0 ? gap : ' '}${word}`
  }
}

function ownLength(question: string): number {
  let length = opening(question).length
  const words = wordsOf(question)
  for (let at = 0; at < length; at++) words.next()
  for (let sentences = 0; sentences < sentencesUnlessAsked; length++) {
    if (/[.!?]$/.test(words.next().value ?? '.')) sentences++
  }
  return length
}

/** The name of an invalid limit in the request; null: none. */
export function badLimitOf(body: Members): string | null {
  const isBad = (limit: unknown): boolean => limit !== undefined && limit !== null && !(Number(limit) >= 1)
  return ['max_tokens', 'max_completion_tokens'].find((name) => isBad(body[name])) ?? null
}

function tokensMaxOf(body: Members): number {
  const limits = [body.max_tokens, body.max_completion_tokens]
  return Math.min(...limits.map((limit) => (typeof limit === 'number' && limit >= 1 ? Math.floor(limit) : Infinity)))
}

export function demoAnswer(body: Members): DemoAnswer {
  const messages = messagesOf(body)
  const question = messages.findLast(({ role }) => role === 'user')?.text ?? ''
  const wanted = wordsAskedFor(question) ?? ownLength(question)
  const tokenCount = Math.min(wanted, tokensMaxOf(body))
  return {
    *tokens() {
      const words = wordsOf(question)
      for (let at = 0; at < tokenCount; at++) yield words.next().value ?? ''
      return undefined
    },
    tokenCount,
    promptTokens: messages.reduce((sum, { text }) => sum + wordCount(text), 0),
    finishReason: tokenCount < wanted ? 'length' : 'stop',
  }
}
