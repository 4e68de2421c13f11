/** The API for our own packages (bench, chaos, tests). No stability guarantee. */

export { startEmbedded } from '@spillway/embedded-postgres'
export { laneOf } from './core/lane.js'
export { newOperationId } from './core/operation-id.js'
export { intakeDefaults } from './core/settings.js'
export { Intake } from './intake/intake.js'
export { coreSql } from './store/postgres/generated/sql.js'
export { migrate } from './store/postgres/migrate.js'
