export { connectNats, type NatsBrokerOptions } from './broker.js'
export { type NatsProbe, probeNats } from './probe.js'
