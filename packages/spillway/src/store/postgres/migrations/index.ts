import { coreTables } from './0001-core-tables.js'
import { accept } from './0002-accept.js'
import { work } from './0003-work.js'
import { tickets } from './0004-tickets.js'
import { ledger } from './0005-ledger.js'
import { petitions } from './0006-petitions.js'
import { messages } from './0007-messages.js'
import { consuming } from './0008-consuming.js'
import { routing } from './0009-routing.js'
import { alerts } from './0010-alerts.js'
import { streams } from './0011-streams.js'

/** In order; a migration that has landed is never edited. */
export const migrations = [
  coreTables,
  accept,
  work,
  tickets,
  ledger,
  petitions,
  messages,
  consuming,
  routing,
  alerts,
  streams,
]
