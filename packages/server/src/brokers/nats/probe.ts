import { connect } from '@nats-io/transport-node'
import { parseAddress } from './server-address.js'

export type NatsProbe =
  | { ok: true; shown: string; version: string; hasJetStream: boolean; payloadBytesMax: number }
  | { ok: false; shown: string; why: string }

const dialTimeoutMs = 3_000

/** Checks for a broker and its version. Changes nothing. */
export async function probeNats(url: string): Promise<NatsProbe> {
  const { shown, options } = parseAddress(url)
  try {
    const nc = await connect({ ...options, timeout: dialTimeoutMs, reconnect: false, name: 'spillway doctor' })
    const { version = '', jetstream = false, max_payload: payloadBytesMax = 0 } = nc.info ?? {}
    await nc.close()
    return { ok: true, shown, version, hasJetStream: jetstream, payloadBytesMax }
  } catch (fault) {
    return { ok: false, shown, why: fault instanceof Error ? fault.name : 'unknown' }
  }
}
