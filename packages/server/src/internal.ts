/** The surface for our own programs (bench, chaos, tests): no promise of stability. */
export { workloadSql } from './http/workload-sql.js'
