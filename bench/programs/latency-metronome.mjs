/**
 * A thread that wakes the main one when something is due. It sleeps in Atomics.wait, which is exact to some tens of
 * microseconds where a timer of the event loop is exact to one or two milliseconds, and it costs the main thread nothing
 * while nothing is due. Plain JavaScript, so that a thread can be made of it wherever it is started from.
 */
import { parentPort, workerData } from 'node:worker_threads'

/** @type {import('./latency-load.js').Beat} */
const { startAt, everyMs, beats } = workerData
const sleeper = new Int32Array(new SharedArrayBuffer(4))

for (let beat = 0; beat < beats; beat++) {
  const leftMs = startAt + beat * everyMs - (performance.timeOrigin + performance.now())
  if (leftMs > 0) Atomics.wait(sleeper, 0, 0, leftMs)
  parentPort?.postMessage(beat)
}
