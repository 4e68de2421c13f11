/** A process that holds an embedded server, for tests to kill. Writes one line of JSON: what it got, or why not. */
import { startEmbedded } from '@spillway/embedded-postgres'

const [dataDir] = process.argv.slice(2)
if (!dataDir) throw new Error('usage: hold-embedded <data folder>')

const log = { info: () => undefined, warn: () => undefined, error: () => undefined }

function report(fields: object): void {
  process.stdout.write(`${JSON.stringify(fields)}\n`)
}

async function hold(dir: string): Promise<void> {
  // As a server that drains: the first Ctrl-C does not end it.
  process.on('SIGINT', () => report({ signal: 'SIGINT' }))
  try {
    const server = await startEmbedded({ dataDir: dir, log })
    report({ url: server.url, pid: server.pid, adopted: server.adopted })
    setInterval(() => undefined, 60_000)
    process.on('SIGTERM', () => {
      void server.stop().then(() => process.exit(0))
    })
  } catch (error) {
    report({ code: error instanceof Error && 'code' in error ? error.code : undefined, message: String(error) })
  }
}

void hold(dataDir)
