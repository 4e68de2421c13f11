import { type Clock, systemClock } from './clock.js'
import {
  type GenerateOptions,
  type GenerateRequest,
  type Generation,
  generate,
  type ResumeOptions,
  resume,
} from './generation/generation.js'
import { createSender } from './http/sender.js'
import { type Messages, messages } from './messages/messages.js'
import { type DeadLetters, deadLetters } from './operations/dead-letters.js'
import { type Lanes, lanes } from './operations/lanes.js'
import { type Operations, operations } from './operations/operations.js'
import { type ClientOptions, settingsOf } from './options.js'
import { type Petitions, petitions } from './petitions/petitions.js'
import type { Parts } from './resources.js'
import { type Route, type RouteDefinition, type RouteResult, route } from './routes/route.js'
import { type Routing, routing } from './routing/routing.js'

export interface Client {
  readonly operations: Operations
  readonly deadLetters: DeadLetters
  readonly lanes: Lanes
  readonly petitions: Petitions
  readonly messages: Messages
  readonly routing: Routing
  /**
   * A route of yours, made of a definition: `client.route<typeof place>('POST /orders').submit(order)`. A type-only import of the
   * definition is enough. `Own`: the body that its `respond` makes, if it has one.
   */
  route<D extends RouteDefinition, Own = RouteResult<D>>(name: string): Route<D, Own>
  /** The same as `messages.push`. */
  readonly push: Messages['push']
  /** Streams generated text. The request is sent when iteration starts. */
  generate(request: GenerateRequest, options?: GenerateOptions): Generation
  /** Continues a stream that was started elsewhere, or before a page was reloaded. */
  resume(streamId: string, options?: ResumeOptions): Generation
}

export function createClient(options: ClientOptions): Client {
  return clientOn(options, systemClock)
}

/** For tests, which pass their own clock. */
export function clientOn(options: ClientOptions, clock: Clock): Client {
  const settings = settingsOf(options)
  const parts: Parts = { settings, clock, send: createSender(settings, clock) }
  const messaging = messages(parts)
  return {
    operations: operations(parts),
    deadLetters: deadLetters(parts),
    lanes: lanes(parts),
    petitions: petitions(parts),
    messages: messaging,
    routing: routing(parts),
    route: (name) => route(parts, name),
    push: messaging.push,
    generate: (request, given = {}) => generate(parts, request, given),
    resume: (streamId, given = {}) => resume(parts, streamId, given),
  }
}
