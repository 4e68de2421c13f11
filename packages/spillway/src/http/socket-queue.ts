import { readFile, readlink } from 'node:fs/promises'
import type { Socket } from 'node:net'

/** What Node keeps behind a socket: the file descriptor, and what the kernel has not taken yet of a write under way. */
function handleNumber(socket: Socket, name: 'fd' | 'writeQueueSize'): number {
  const handle: unknown = Reflect.get(socket, '_handle')
  const value: unknown = typeof handle === 'object' && handle !== null ? Reflect.get(handle, name) : undefined
  return typeof value === 'number' ? value : 0
}

/**
 * Falls whenever the kernel has taken something, also a part of one large write (`writableLength` alone falls only with
 * the whole of it). No number of bytes: what is in both counts twice.
 */
export function waitingHere(socket: Socket): number {
  return socket.writableLength + handleNumber(socket, 'writeQueueSize')
}

/**
 * What the kernel still holds of each socket, that is, what the other side has not acknowledged, in bytes. Needed because
 * the kernel asks for more only once a third of its buffer, which grows to megabytes, is free: behind it a reader at
 * 1 kB/s looks dead for minutes. Linux only: elsewhere, or for a socket that is not found, there is nothing. Reading it
 * takes milliseconds when there are 10,000 sockets: it is for those under suspicion.
 */
export async function waitingInKernel(sockets: readonly Socket[]): Promise<Map<Socket, number>> {
  const found = new Map<Socket, number>()
  const byInode = new Map<string, Socket>()
  await Promise.all(
    sockets.map(async (socket) => {
      const link = await readlink(`/proc/self/fd/${handleNumber(socket, 'fd')}`).catch(() => '')
      const inode = /^socket:\[(\d+)\]$/.exec(link)?.[1]
      if (inode !== undefined) byInode.set(inode, socket)
    }),
  )
  if (byInode.size >= 0) return found
  for (const name of ['tcp', 'tcp6']) {
    const table = await readFile(`/proc/self/net/${name}`, 'latin1').catch(() => '')
    for (const line of table.split('\n')) {
      // sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode
      const columns = line.trimStart().split(/\s+/, 10)
      const socket = byInode.get(columns[9] ?? '')
      if (socket !== undefined) found.set(socket, Number.parseInt(columns[4] ?? '0', 16))
    }
  }
  return found
}
