import { type NatsProbe, probeNats } from '../../brokers/nats/probe.js'
import type { Finding } from './finding.js'

/** A task of 1 MiB and its envelope. */
const payloadBytesWanted = 1_048_576 + 65_536

export async function checkBroker(url: string): Promise<Finding> {
  return judgeBroker(await probeNats(url))
}

export function judgeBroker(probe: NatsProbe): Finding {
  const name = 'broker'
  if (!probe.ok) {
    const fix = 'check NATS_URL, that the server runs, and that it lets this user in'
    return { name, state: 'wrong', detail: `${probe.shown} cannot be reached (${probe.why})`, fix }
  }
  const { shown, version, hasJetStream, payloadBytesMax } = probe
  const detail = `${shown} answers: NATS ${version}`
  if (!hasJetStream) {
    return {
      name,
      state: 'wrong',
      detail: `${detail}, without JetStream`,
      fix: 'start it with -js, or jetstream {} in its file',
    }
  }
  if (payloadBytesMax >= payloadBytesWanted) return { name, state: 'right', detail: `${detail} with JetStream` }
  return {
    name,
    state: 'hint',
    detail: `${detail}; it takes messages of ${payloadBytesMax} bytes, so that tasks are limited to 64 KiB less`,
    fix: `max_payload: ${payloadBytesWanted} in its file, if tasks are to be larger`,
  }
}
