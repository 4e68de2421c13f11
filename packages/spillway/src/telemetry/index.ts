export { createLogger, type Logger } from './logs.js'
export { createMessageMetrics } from './message-metrics.js'
export { createMetrics } from './metrics.js'
export { createPetitionMetrics } from './petition-metrics.js'
