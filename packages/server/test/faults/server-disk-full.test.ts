/** The database's disk is full: refusals, no corruption, and it goes on when there is space. */
import { spawnSync } from 'node:child_process'
import { appendFile, chmod, mkdir, mkdtemp, rm, statfs, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { afterEach, expect, it } from 'vitest'
import {
  type Answer,
  endAll,
  finishes,
  get,
  startServer,
  startTarget,
  submit,
  until,
  untilReady,
} from '../server-process.js'

/** Mounts are made in a namespace of the server's own: nothing is left on the machine, whatever happens. */
const canMount =
  process.platform === 'linux' &&
  spawnSync('unshare', ['-m', 'sh', '-c', 'mount -t tmpfs -o size=1m tmpfs /mnt && touch /mnt/x']).status === 0
if (!canMount) console.info('the disk-full test is left out: this account may not mount a tmpfs')

afterEach(() => endAll())

async function fill(file: string): Promise<void> {
  for (;;) {
    try {
      await appendFile(file, Buffer.alloc(4_096))
    } catch (fault) {
      if (fault instanceof Error && 'code' in fault && fault.code === 'ENOSPC') return
      throw fault
    }
  }
}

it.runIf(canMount)(
  'refuses while the disk is full, and continues later with everything it had accepted',
  async () => {
    const dir = await mkdtemp(join(tmpdir(), 'spillway-full-'))
    await chmod(dir, 0o755)
    const disk = join(dir, 'disk')
    await mkdir(disk)
    const target = await startTarget()
    const server = await startServer(
      { SPILLWAY_DATA_DIR: join(disk, 'data'), SPILLWAY_FORWARD_ALLOW: target.origin },
      { wrap: ['unshare', '-m', 'sh', '-c', `mount -t tmpfs -o size=400m,mode=755 tmpfs ${disk} && exec "$@"`, 'sh'] },
    )
    const inside = join(`/proc/${server.pid}/root`, disk)
    const accepted: string[] = []
    const note = (answer: Answer): Answer => {
      if (answer.status < 300) accepted.push(answer.body.operationId)
      return answer
    }
    note(await submit(server, `${target.origin}/before`))
    const { bavail, bsize } = await statfs(inside)
    await writeFile(join(inside, 'filler'), Buffer.alloc(bavail * bsize - 4_096 * 4)).catch((fault: unknown) => {
      // Full before the end is what is wanted.
      if (!(fault instanceof Error && 'code' in fault && fault.code === 'ENOSPC')) throw fault
    })
    const large = { body: 'x'.repeat(500_000) }
    let n = 0
    const refused = await until(
      'the disk is full',
      async () => {
        const answer = note(
          await submit(server, `${target.origin}/large`, { queue: `l${n++}`, delay_seconds: 3_600, payload: large }),
        )
        return answer.status >= 300 && answer
      },
      60_000,
    )
    expect(refused.status).toBe(503)
    expect(refused.body.code).toBe('store_unavailable')
    expect(Number(refused.headers.get('retry-after'))).toBeGreaterThanOrEqual(1)
    expect((await get(server, '/health')).status).toBe(200)
    expect((await get(server, '/metrics')).status).toBe(200)
    // What was too large left some; now there is none for anybody.
    await fill(join(inside, 'rest'))
    const unready = await until('it is not ready', async () => {
      const answer = await get(server, '/health/ready')
      return answer.status === 503 && answer
    })
    expect(unready.body.checks.store).toMatchObject({ ok: false, detail: expect.stringContaining('disk space') })
    // Without anybody who asks for work.
    for (const end = performance.now() + 3_000; performance.now() < end; await delay(100)) {
      expect((await get(server, '/health/ready')).status).toBe(503)
    }

    await rm(join(inside, 'filler'))
    await rm(join(inside, 'rest'))
    await untilReady(server)
    await until(
      'work is accepted again',
      async () => note(await submit(server, `${target.origin}/after`, { queue: 'after' })).status < 300,
      60_000,
    )
    for (const id of accepted) expect((await get(server, `/api/v1/operations/${id}`)).status).toBe(200)
    const last = accepted.at(-1) ?? ''
    expect((await finishes(server, last)).status).toBe('completed')
    expect(await server.stop()).toEqual({ code: 0, signal: null })
    await target.close()
    await rm(dir, { recursive: true, force: true })
  },
  240_000,
)
