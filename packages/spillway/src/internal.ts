/** The surface for our own packages (bench, chaos, tests): no promise of stability. */

export { workloadSql } from './http/workload-sql.js'
export { laneOf } from './operations/lane.js'
export { newOperationId } from './operations/operation-id.js'
export { Intake } from './pipeline/intake.js'
export { intakeDefaults } from './pipeline/settings.js'
export { startEmbedded } from './store/embedded/index.js'
export { coreSql } from './store/postgres/generated/sql.js'
export { migrate } from './store/postgres/migrate.js'
