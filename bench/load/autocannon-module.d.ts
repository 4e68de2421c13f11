/** The part of autocannon that is used here; it has no types of its own. */
declare module 'autocannon' {
  interface Options {
    url: string
    connections: number
    duration: number
    pipelining: number
    timeout: number
    requests: { setupRequest: () => object }[]
  }
  interface Result {
    requests: { total: number }
    /** Seconds. */
    duration: number
    non2xx: number
    errors: number
    timeouts: number
    latency: { p50: number; p99: number }
  }
  export default function autocannon(options: Options): Promise<Result>
}
