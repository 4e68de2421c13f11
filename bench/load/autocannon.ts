/** Where there is no wrk. It is written in JavaScript, takes a whole core, and makes all figures lower than they are. */
import { readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import autocannon from 'autocannon'
import { type LoadGenerator, toResult } from './load.js'
import { requestMaker } from './requests.js'

export function autocannonGenerator(): LoadGenerator {
  const manifest = createRequire(import.meta.url).resolve('autocannon/package.json')
  const { version } = JSON.parse(readFileSync(manifest, 'utf8')) as { version: string }
  return {
    name: `autocannon ${version}`,
    async run(load) {
      const { origin, connections, seconds } = load
      const result = await autocannon({
        url: origin,
        connections,
        duration: seconds,
        pipelining: 1,
        timeout: 10,
        requests: [{ setupRequest: requestMaker(load) }],
      })
      return toResult(load, {
        requests: result.requests.total,
        seconds: result.duration,
        failed: result.non2xx + result.errors + result.timeouts,
        p50Ms: result.latency.p50,
        p99Ms: result.latency.p99,
      })
    },
  }
}
