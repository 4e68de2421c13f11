/** Streams that outlive their connection, on two real instances: resumed, repeated, cancelled, left. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { monotonicMs } from '../../../spillway/test/setup/scripted-upstream.js'
import {
  as,
  chat,
  chatBody,
  type Fleet,
  native,
  occupy,
  rawBehind,
  resume,
  type SseStream,
  startFleet,
} from '../generation-server.js'
import { get, post, type ServerProcess, until } from '../server-process.js'

const unknownId = '0190a8e0-0000-7000-8000-000000000000'
/** What is allowed between a client's leaving, or a cancel, and the upstream's hearing of it. */
const hearsMs = 1_000
const graceMs = 2_000

let fleet: Fleet
/** Two instances of one service, with one place for each user. */
let here: ServerProcess
let there: ServerProcess

beforeAll(async () => {
  fleet = await startFleet()
  const pair = await fleet.startPair({
    CONNECTION_POOL_MAX_PER_USER: '1',
    STREAM_HEARTBEAT_SECONDS: '1',
    STREAM_DETACH_GRACE_SECONDS: String(graceMs / 1_000),
  })
  here = pair[0]
  there = pair[1]
})

afterAll(() => fleet.close())

const forms = { native, openai: chat } as const
const eachForm = Object.entries(forms)
const both = () => [here, there]
const cancel = (server: ServerProcess, user: string, id: string) =>
  post(server, `/api/v1/streams/${id}/cancel`, undefined, as(user))
const hasToken = ({ content }: SseStream) => content !== ''
/** The events that are in the log. The others are sent on one connection only. */
const idsOf = (stream: SseStream) => stream.events.flatMap(({ id }) => (id === null ? [] : [Number(id)]))

describe.concurrent('a stream that has ended', () => {
  it.each(eachForm)('is replayed from every position, byte for byte: %s', async (form, ask) => {
    const user = `ended-${form}`
    const stream = await (await ask(here, user, `marker=${user} tokens=3`)).whole()
    const positions = idsOf(stream).map((id) => id - 1)
    expect(positions.length).toBeGreaterThanOrEqual(5)
    for (const after of positions) {
      const server = after % 2 === 0 ? here : there
      const [byHeader, byQuery] = await Promise.all([
        resume(server, user, stream.id, { header: after }).then((resumed) => resumed.whole()),
        resume(server, user, stream.id, { query: after }).then((resumed) => resumed.whole()),
      ])
      expect([byHeader.raw, byQuery.raw]).toEqual(Array(2).fill(rawBehind(stream.raw, after)))
    }
    const whole = await (await resume(here, user, stream.id)).whole()
    expect(whole.raw).toBe(rawBehind(stream.raw, 0))
  })

  it('has nothing left behind its last event, nor further on', async () => {
    const stream = await (await native(here, 'left', 'marker=left tokens=2')).whole()
    const last = Math.max(...idsOf(stream))
    const path = `/api/v1/streams/${stream.id}`
    const answers = await Promise.all([
      get(here, path, { ...as('left'), 'last-event-id': String(last) }),
      get(there, `${path}?starting_after=${last}`, as('left')),
      get(there, `${path}?starting_after=${last + 5}`, as('left')),
    ])
    expect(answers.map(({ status, text }) => [status, text])).toEqual(Array(3).fill([204, '']))
  })

  it('followed as an operation, has its last status behind all of its output, and then nothing left', async () => {
    const stream = await (await native(here, 'followed', 'marker=followed tokens=2')).whole()
    const path = `/api/v1/operations/${stream.id}/stream`
    const follow = async (last = '0') => {
      const { status, text } = await get(there, path, { ...as('followed'), 'last-event-id': last })
      return {
        status,
        events: [...text.matchAll(/^id: (.*)\nevent: (.*)$/gm)].map(([, id = '', event]) => ({ id, event })),
      }
    }
    await until('it is settled', async () => (await follow()).events.at(-1)?.event === 'status')
    const { events } = await follow()
    const chunks = events.filter(({ event }) => event !== 'status').map(({ id }) => Number(id))
    expect(chunks).toEqual(idsOf(stream))
    const rest = await follow(String(chunks.at(-1)))
    expect(rest.events.map(({ event }) => event)).toEqual(['status'])
    expect((await follow(events.at(-1)?.id)).status).toBe(204)
  })

  it('with an error is replayed with the error', async () => {
    const stream = await (await chat(here, 'failed', 'marker=failed tokens=2 end=error')).whole()
    const again = await (await resume(there, 'failed', stream.id, { header: 2 })).whole()
    expect(again.error).toEqual(stream.error)
    expect(again.raw).toBe(rawBehind(stream.raw, 2))
  })

  it('goes by Last-Event-ID where the address names a position too', async () => {
    const stream = await (await native(here, 'newer', 'marker=newer tokens=3')).whole()
    const again = await (await resume(here, 'newer', stream.id, { header: 3, query: 1 })).whole()
    expect(again.raw).toBe(rawBehind(stream.raw, 3))
  })

  it('is resumed with the headers of a stream', async () => {
    const stream = await (await native(here, 'heads', 'tokens=1')).whole()
    const { headers } = await (await resume(there, 'heads', stream.id)).whole()
    expect(Object.fromEntries(headers)).toMatchObject({
      'content-type': 'text/event-stream; charset=utf-8',
      'cache-control': 'no-cache, no-transform',
      'x-accel-buffering': 'no',
      'x-stream-id': stream.id,
      'x-thread-id': stream.headers.get('x-thread-id'),
    })
  })

  it('cannot be cancelled any more', async () => {
    const stream = await (await native(here, 'over', 'tokens=1')).whole()
    const answer = await until('it is settled', async () => {
      const asked = await cancel(here, 'over', stream.id)
      return asked.status !== 200 && asked
    })
    expect([answer.status, answer.body.code]).toEqual([409, 'operation_finished'])
  })
})

describe.concurrent('a stream that is not there', () => {
  it.each(['nothing', '123', unknownId, `${unknownId}0`])('%s is 404, to read and to cancel', async (id) => {
    const answers = await Promise.all([get(here, `/api/v1/streams/${id}`), cancel(here, 'ann', id)])
    expect(answers.map(({ status, body }) => [status, body.code])).toEqual(Array(2).fill([404, 'not_found']))
  })

  it('is what another’s stream looks like, also to cancel', async () => {
    const stream = await native(here, 'mine', 'marker=mine tokens=1 end=hang')
    await stream.seen('its token', hasToken)
    const answers = await Promise.all([
      ...both().map((server) => get(server, `/api/v1/streams/${stream.id}`, as('yours'))),
      ...both().map((server) => cancel(server, 'yours', stream.id)),
    ])
    expect(answers.map(({ status }) => status)).toEqual([404, 404, 404, 404])
    fleet.upstream.release('mine')
    expect((await stream.whole()).error).toBeUndefined()
  })

  it.each(['x', '-1', '1.5', '99999999999999999999'])('is not looked for from the position %s', async (position) => {
    const stream = await (await native(here, `at${position}`, 'tokens=1')).whole()
    const path = `/api/v1/streams/${stream.id}`
    const answers = await Promise.all([
      get(here, path, { ...as(`at${position}`), 'last-event-id': position }),
      get(here, `${path}?starting_after=${position}`, as(`at${position}`)),
    ])
    expect(answers.map(({ status, body }) => [status, body.code])).toEqual(Array(2).fill([400, 'invalid_request']))
  })
})

describe.concurrent('a stream that runs', () => {
  it.each(eachForm)('is gone on with from every position, on both instances: %s', async (form, ask) => {
    const user = `running-${form}`
    const stream = await ask(here, user, `marker=${user} tokens=3 end=hang`)
    await stream.seen('its tokens', ({ content }) => content.endsWith('#3'))
    const positions = [0, ...idsOf(stream)]
    const resumed = await Promise.all(
      positions.flatMap((after) => both().map((server) => resume(server, user, stream.id, { query: after }))),
    )
    await Promise.all(
      resumed.slice(0, 2).map((each) => each.seen('what there is', ({ content }) => content.endsWith('#3'))),
    )
    fleet.upstream.release(user)
    await stream.whole()
    for (const [i, each] of resumed.entries()) {
      await each.whole()
      expect(each.raw).toBe(rawBehind(stream.raw, positions[Math.floor(i / 2)] ?? 0))
    }
    expect(fleet.timesAsked(user)).toBe(1)
  })

  it('is not waited for by a reader who claims to have had more than there is', async () => {
    const stream = await native(here, 'ahead', 'marker=ahead tokens=1 end=hang')
    await stream.seen('its token', hasToken)
    const answer = await get(there, `/api/v1/streams/${stream.id}?starting_after=50`, as('ahead'))
    expect([answer.status, answer.body.code]).toEqual([400, 'invalid_request'])
    fleet.upstream.release('ahead')
    await stream.whole()
  })

  it('is stopped by a cancel on the other instance: the upstream request is aborted, its readers get the end', async () => {
    const stream = await native(here, 'stop', 'marker=stop tokens=1 end=hang')
    await stream.seen('its token', hasToken)
    const askedMs = monotonicMs()
    const answer = await cancel(there, 'stop', stream.id)
    expect([answer.status, answer.body]).toEqual([200, { id: stream.id, status: 'cancelled' }])
    expect((await fleet.abortedMs('stop')) - askedMs).toBeLessThan(hearsMs)
    await stream.whole()
    expect(stream.error).toEqual({ message: expect.any(String), code: 'generation_cancelled', retryable: false })
  })

  it('is stopped by a cancel where it runs, in OpenAI’s form without [DONE]', async () => {
    const stream = await chat(here, 'stop-chat', 'marker=stop-chat tokens=1 end=hang')
    await stream.seen('its token', hasToken)
    const askedMs = monotonicMs()
    await cancel(here, 'stop-chat', stream.id)
    expect((await fleet.abortedMs('stop-chat')) - askedMs).toBeLessThan(hearsMs)
    await stream.whole()
    expect(stream.error).toMatchObject({ code: 'generation_cancelled' })
    expect(stream.raw).not.toContain('[DONE]')
  })
})

describe.concurrent('a stream that waits', () => {
  it('is never begun once it was cancelled, on the other instance', async () => {
    const held = await occupy(fleet, here, 'unqueue')
    const stream = await native(here, 'unqueue', 'marker=unqueue')
    expect((await cancel(there, 'unqueue', stream.id)).status).toBe(200)
    await stream.whole()
    expect(stream.error).toMatchObject({ code: 'generation_cancelled', retryable: false })
    held.release()
    // Behind it in the same lane: its turn comes only when that one is over.
    await (await native(here, 'unqueue', 'marker=unqueue-next tokens=1')).whole()
    expect(fleet.timesAsked('unqueue')).toBe(0)
  })

  it('in OpenAI’s form is never begun once its client has left', async () => {
    const held = await occupy(fleet, here, 'impatient')
    const stream = await chat(here, 'impatient', 'marker=impatient')
    expect(stream.layer).toBe('3-Queue-Failover')
    stream.leave()
    await until('it is cancelled', async () => {
      const { body } = await get(there, `/api/v1/operations/${stream.id}`, as('impatient'))
      return body.status === 'cancelled'
    })
    held.release()
    await (await native(here, 'impatient', 'marker=impatient-next tokens=1')).whole()
    expect(fleet.timesAsked('impatient')).toBe(0)
  })

  it('can be resumed on the other instance before it has begun', async () => {
    const held = await occupy(fleet, here, 'roam')
    const stream = await native(here, 'roam', 'marker=roam tokens=2')
    stream.leave()
    const resumed = await resume(there, 'roam', stream.id)
    held.release()
    await resumed.whole()
    expect([resumed.content, resumed.error]).toEqual([' roam#1 roam#2', undefined])
  })
})

describe.concurrent('a client that leaves', () => {
  it('an OpenAI stream stops the upstream', async () => {
    const stream = await chat(here, 'gone', 'marker=gone tokens=1 end=hang')
    await stream.seen('its token', hasToken)
    const leftMs = stream.leave()
    expect((await fleet.abortedMs('gone')) - leftMs).toBeLessThan(hearsMs)
  })

  it('an OpenAI stream before its first token stops the upstream', async () => {
    const stream = await chat(here, 'gone-early', 'marker=gone-early first=60000')
    await fleet.asked('gone-early')
    const leftMs = stream.leave()
    expect((await fleet.abortedMs('gone-early')) - leftMs).toBeLessThan(hearsMs)
  })

  it('an answer that does not stream stops the upstream', async () => {
    const leaving = new AbortController()
    const answer = fetch(`${here.origin}/v1/chat/completions`, {
      method: 'POST',
      headers: { 'content-type': 'application/json', ...as('gone-whole') },
      body: JSON.stringify(chatBody('marker=gone-whole first=60000', { stream: false })),
      signal: leaving.signal,
    })
    await fleet.asked('gone-whole')
    const leftMs = monotonicMs()
    leaving.abort()
    await expect(answer).rejects.toThrow()
    expect((await fleet.abortedMs('gone-whole')) - leftMs).toBeLessThan(hearsMs)
  })

  it('an OpenAI stream that another still reads does not stop it', async () => {
    const headers = { 'idempotency-key': 'shared' }
    const script = 'marker=shared tokens=1 end=hang'
    const first = await chat(here, 'shared', script, { headers })
    const second = await chat(there, 'shared', script, { headers })
    await second.seen('its token', hasToken)
    const before = second.raw.length
    first.leave()
    // Longer than a lost reader takes to reach the upstream.
    await second.seen('two heartbeats more', ({ raw }) => raw.slice(before).endsWith(':\n:\n'))
    fleet.upstream.release('shared')
    await second.whole()
    expect([second.error, second.events.at(-1)?.data]).toEqual([undefined, '[DONE]'])
  })

  it('a native stream can be resumed, on the other instance too', async () => {
    const stream = await native(here, 'back', 'marker=back tokens=2 every=200 end=hang')
    await stream.seen('its first token', hasToken)
    stream.leave()
    const resumed = await resume(there, 'back', stream.id, { header: 1 })
    await resumed.seen('the second token', ({ content }) => content === ' back#2')
    fleet.upstream.release('back')
    await resumed.whole()
    expect([resumed.dataOf('complete').length, fleet.timesAsked('back')]).toEqual([1, 1])
  })

  it('a native stream for good stops the upstream after STREAM_DETACH_GRACE_SECONDS', async () => {
    const stream = await native(here, 'detach', 'marker=detach tokens=1 end=hang')
    await stream.seen('its token', hasToken)
    const leftMs = stream.leave()
    const heardMs = await fleet.abortedMs('detach')
    expect(heardMs - leftMs).toBeGreaterThan(graceMs * 0.9)
    const read = await (await resume(here, 'detach', stream.id, { header: 1 })).whole()
    expect(read.error).toMatchObject({ code: 'generation_cancelled' })
  })
})

describe.concurrent('an Idempotency-Key', () => {
  const key = (value: string) => ({ headers: { 'idempotency-key': value } })

  it.each(eachForm)('that comes twice at once is one stream: %s', async (form, ask) => {
    const user = `twice-${form}`
    const script = `marker=${user} tokens=3 every=50`
    const streams = await Promise.all([ask(here, user, script, key('k')), ask(there, user, script, key('k'))])
    await Promise.all(streams.map((stream) => stream.whole()))
    const [one, two] = streams
    expect(one.id).toBe(two.id)
    expect(rawBehind(one.raw, 0)).toBe(rawBehind(two.raw, 0))
    const replayed = streams.map(({ headers }) => headers.get('idempotent-replayed'))
    expect(replayed.filter((header) => header === 'true').length).toBe(1)
    expect(fleet.timesAsked(user)).toBe(1)
  })

  it('that comes later brings the same stream, on the other instance', async () => {
    const first = await (await chat(here, 'later', 'marker=later tokens=2', key('k'))).whole()
    const again = await (await chat(there, 'later', 'marker=later tokens=2', key('k'))).whole()
    expect([again.id, again.raw]).toEqual([first.id, first.raw])
    expect(again.headers.get('idempotent-replayed')).toBe('true')
    expect(fleet.timesAsked('later')).toBe(1)
  })

  it('that is repeated without a stream gets the same answer', async () => {
    const body = chatBody('marker=whole-again tokens=2', { stream: false })
    const headers = { ...as('whole-again'), 'idempotency-key': 'k' }
    const first = await post(here, '/v1/chat/completions', body, headers)
    const again = await post(there, '/v1/chat/completions', body, headers)
    expect([first.status, again.status, again.text]).toEqual([200, 200, first.text])
    expect(fleet.timesAsked('whole-again')).toBe(1)
  })

  it('that comes while the first waits, waits with it', async () => {
    const held = await occupy(fleet, here, 'wait-key')
    const first = await chat(here, 'wait-key', 'marker=wait-key tokens=2', key('k'))
    const second = await chat(there, 'wait-key', 'marker=wait-key tokens=2', key('k'))
    expect(second.id).toBe(first.id)
    held.release()
    await Promise.all([first.whole(), second.whole()])
    expect([first.content, second.content]).toEqual(Array(2).fill(' wait-key#1 wait-key#2'))
    expect(fleet.timesAsked('wait-key')).toBe(1)
  })

  it('with another body is refused', async () => {
    await (await chat(here, 'other', 'marker=other tokens=1', key('k'))).whole()
    const headers = { ...as('other'), 'idempotency-key': 'k' }
    const openai = await post(there, '/v1/chat/completions', chatBody('marker=other tokens=2'), headers)
    expect([openai.status, openai.body.error]).toMatchObject([422, { code: 'idempotency_mismatch' }])
    expect(fleet.timesAsked('other')).toBe(1)
  })

  it('of another user is another key', async () => {
    const one = await (await native(here, 'key-ann', 'tokens=1', key('k'))).whole()
    const two = await (await native(here, 'key-bob', 'tokens=1', key('k'))).whole()
    expect(one.id).not.toBe(two.id)
  })

  it('of another route is another key', async () => {
    const one = await (await native(here, 'key-route', 'tokens=1', key('k'))).whole()
    const two = await (await chat(here, 'key-route', 'tokens=1', key('k'))).whole()
    expect([one.status, two.status]).toEqual([200, 200])
    expect(one.id).not.toBe(two.id)
  })
})

describe('the places of a user', () => {
  it('are counted over both instances', async () => {
    const first = await native(here, 'spread', 'marker=spread tokens=1 end=hang')
    await first.seen('its token', hasToken)
    const second = await (await native(there, 'spread', 'marker=spread-2 tokens=1')).whole()
    expect([first.layer, second.layer]).toEqual(['1-Direct', '3-Queue-Failover'])
    fleet.upstream.release('spread')
    await first.whole()
  })
})
