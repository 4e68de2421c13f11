/** The surface for our own packages (bench, chaos, tests): no promise of stability. */

export { startEmbedded } from '@spillway/embedded-postgres'
export { laneOf } from './operations/lane.js'
export { newOperationId } from './operations/operation-id.js'
export { Intake } from './pipeline/intake.js'
export { intakeDefaults } from './pipeline/settings.js'
export { coreSql } from './store/postgres/generated/sql.js'
export { migrate } from './store/postgres/migrate.js'
