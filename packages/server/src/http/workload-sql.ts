/** The tables and functions of the ready server's workloads. A library user's database has the core's only. */
import { alertsSql } from '../workloads/alerts/generated/sql.js'
import { messagesSql } from '../workloads/messages/generated/sql.js'
import { objectivesSql } from '../workloads/objectives/generated/sql.js'
import { petitionsSql } from '../workloads/petitions/generated/sql.js'
import { routingSql } from '../workloads/routing/generated/sql.js'

export const workloadSql = [petitionsSql, messagesSql, routingSql, alertsSql, objectivesSql]
