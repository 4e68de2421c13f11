/** The surface for our own programs (bench, chaos, tests): no promise of stability. */
export { workloadSql } from './workload-list.js'
