/** The tables and functions of the server's workloads. A library user's database has only the core's. */
import { alertsSql } from '../workloads/alerts/generated/sql.js'
import { messagesSql } from '../workloads/messages/generated/sql.js'
import { objectivesSql } from '../workloads/objectives/generated/sql.js'
import { petitionsSql } from '../workloads/petitions/generated/sql.js'
import { routingSql } from '../workloads/routing/generated/sql.js'

export const workloadSql = [petitionsSql, messagesSql, routingSql, alertsSql, objectivesSql]
