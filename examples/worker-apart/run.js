/** Starts a web process, submits images, and starts two workers afterwards. */
import assert from 'node:assert/strict'
import { fork } from 'node:child_process'
import { once } from 'node:events'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { startEmbedded } from '@spillway/embedded-postgres'

const dataDir = await mkdtemp(join(tmpdir(), 'spillway-worker-apart-'))
const database = await startEmbedded({ dataDir })
const env = { ...process.env, DATABASE_URL: database.url, PORT: '0' }
const processes = []

/** What the process says when it is ready. */
async function start(program) {
  const child = fork(new URL(program, import.meta.url), { env })
  processes.push(child)
  const failed = once(child, 'exit').then(([code]) => Promise.reject(new Error(`${program} ended with ${code}`)))
  const [said] = await Promise.race([once(child, 'message'), failed])
  return said
}

try {
  const { port } = await start('web.js')
  const origin = `http://127.0.0.1:${port}`
  const submit = async (image) => {
    const headers = { 'content-type': 'application/json' }
    const answer = await fetch(`${origin}/images`, { method: 'POST', headers, body: JSON.stringify({ image }) })
    assert.equal(answer.status, 202)
    return answer.headers.get('location')
  }
  const locations = await Promise.all(['a', 'b', 'c', 'd'].map(submit))
  console.log(`${locations.length} images are accepted, and nobody runs them yet`)

  const [first] = await Promise.all([start('worker.js'), start('worker.js')])
  assert.equal(first, 'ready')
  for (const location of locations) {
    const { status, result } = await (await fetch(`${origin}${location}?wait=30`)).json()
    assert.equal(status, 'completed')
    assert.notEqual(result.resizedBy, processes[0].pid)
    console.log(`${result.image} was resized by process ${result.resizedBy}`)
  }
} finally {
  for (const child of processes) if (child.kill('SIGTERM')) await once(child, 'exit')
  await database.stop()
  await rm(dataDir, { recursive: true, force: true })
}
