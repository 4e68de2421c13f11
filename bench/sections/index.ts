import type { Section } from '../section.js'
import { accept } from './accept.js'
import { bulk } from './bulk.js'
import { drain } from './drain.js'
import { gates } from './gates.js'
import { generation } from './generation.js'
import { idle } from './idle.js'
import { latency } from './latency.js'
import { lone } from './lone.js'
import { messages } from './messages.js'
import { overload } from './overload.js'
import { petitions } from './petitions.js'
import { routing } from './routing.js'
import { scaling } from './scaling.js'
import { sweep } from './sweep.js'

/** In the order in which they run and stand on the page. */
export const sections: readonly Section[] = [
  accept,
  bulk,
  lone,
  gates,
  petitions,
  messages,
  routing,
  generation,
  drain,
  latency,
  scaling,
  overload,
  sweep,
  idle,
]
