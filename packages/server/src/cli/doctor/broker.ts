import { type NatsProbe, probeNats } from '../../brokers/nats/probe.js'
import { type Finding, hint, right, wrong } from './finding.js'

const name = 'broker'
/** A task of 1 MiB and its envelope. */
const payloadBytesWanted = 1_048_576 + 65_536

export async function checkBroker(url: string): Promise<Finding> {
  return judgeBroker(await probeNats(url))
}

export function judgeBroker(probe: NatsProbe): Finding {
  if (!probe.ok) {
    const fix = 'check NATS_URL, that the server runs, and that it lets this user in'
    return wrong(name, `${probe.shown} cannot be reached (${probe.why})`, fix)
  }
  const { shown, version, hasJetStream, payloadBytesMax } = probe
  const detail = `${shown} answers: NATS ${version}`
  if (!hasJetStream)
    return wrong(name, `${detail}, without JetStream`, 'start it with -js, or jetstream {} in its file')
  if (payloadBytesMax >= payloadBytesWanted) return right(name, `${detail} with JetStream`)
  return hint(
    name,
    `${detail}; it takes messages of ${payloadBytesMax} bytes, so that tasks are limited to 64 KiB less`,
    `max_payload: ${payloadBytesWanted} in its file, if tasks are to be larger`,
  )
}
