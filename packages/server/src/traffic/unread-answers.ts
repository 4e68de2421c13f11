/**
 * Closes answers that their clients do not read. Node's own socket timeout restarts with every incoming byte, so a client
 * that drips a second request would keep an unread answer forever.
 *
 * Nothing is done per request. All open sockets are checked a few times within the limit, and those with waiting bytes are
 * watched until the bytes are gone. 20,000 sockets take 2 ms.
 */
import type { Server, ServerResponse } from 'node:http'
import type { Socket } from 'node:net'
import { answerOf, periodic } from 'spillway/workload'
import { waitingHere } from './socket-queue.js'
import { StallWatch } from './stall.js'

export const unreadMsDefault = 30_000

const ownersAnswers = new WeakSet<object>()

/** The writer of this answer closes it itself when it is not read: streams have their own limit. */
export function leaveToOwner(response: ServerResponse): void {
  ownersAnswers.add(response)
}

export interface UnreadOptions {
  unreadMs: number
  onClosed(socket: Socket): void
}

export function closeUnread(server: Server, { unreadMs, onClosed }: UnreadOptions): void {
  const open = new Set<Socket>()
  const isUnread = (socket: Socket): boolean => {
    if (socket.destroyed || waitingHere(socket) === 0) return false
    const answer = answerOf(socket)
    return answer === null || !ownersAnswers.has(answer)
  }
  const watch = new StallWatch<Socket>({
    stallMs: unreadMs,
    socketOf: (socket) => socket,
    onStalled: (socket) => {
      if (!isUnread(socket)) return
      socket.destroy()
      onClosed(socket)
    },
  })
  const looks = periodic(watch.everyMs, async () => {
    for (const socket of open) {
      if (isUnread(socket)) watch.add(socket)
      else watch.delete(socket)
    }
    await watch.look()
  })
  server.on('connection', (socket: Socket) => {
    open.add(socket)
    socket.once('close', () => {
      open.delete(socket)
      watch.delete(socket)
    })
  })
  server.once('close', () => void looks.stop())
}
