import type { FastifyInstance } from 'fastify'
import type { Intake } from '../intake/intake.js'
import { type Problem, sendProblem } from './problem.js'

export const notReady: Problem = {
  code: 'store_unavailable',
  detail: 'The store cannot be reached yet. Try again later.',
  retryAfterMs: 2_000,
}

/** For routes that read: there may be no tables yet, and a failing statement would look like our defect. */
export function refuseUntilReady(app: Pick<FastifyInstance, 'addHook'>, intake: Intake): void {
  app.addHook('onRequest', (_, reply, done) => {
    if (intake.presence.isReady) return done()
    sendProblem(reply, notReady)
  })
}
