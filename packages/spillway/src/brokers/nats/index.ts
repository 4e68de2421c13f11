export { connectNats, type NatsBrokerOptions } from './broker.js'
