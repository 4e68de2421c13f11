/** Creating queues and changing their options. */
import type { ConfigureQueue } from '@spillway/protocol/schema'
import { queueOptionDefaults } from '@spillway/protocol/wire'
import { ProblemError } from 'spillway/workload'
import type { Static } from 'typebox'
import { optionNames, queueProblem } from '../queues.js'
import type { Admin, AdminRequest } from './route.js'

export async function configureQueue(
  { queues, seal }: Admin,
  { body, principal }: AdminRequest<unknown, Static<typeof ConfigureQueue>>,
): Promise<unknown> {
  const { queue, namespace = null, task = null, options } = body
  const problem = queueProblem(principal.queues, queue)
  if (problem !== null) throw new ProblemError(problem)
  const given: Record<string, number | boolean> = {}
  for (const name of optionNames) {
    const value = options?.[name]
    if (value !== undefined && value !== null) given[name] = value
  }
  if (options !== null && options !== undefined && 'ttl' in options) {
    throw new ProblemError({
      code: 'invalid_request',
      detail: 'The option ttl is not enforced here. Use retentionSeconds with retentionEnabled.',
      errors: [{ path: '/options/ttl', message: 'is not supported' }],
    })
  }
  if (given.encryptionEnabled === true && seal === null) {
    throw new ProblemError({
      code: 'invalid_request',
      detail: 'This server has no key to encrypt with. Set SPILLWAY_ENCRYPTION_KEY, on every instance.',
      errors: [{ path: '/options/encryptionEnabled', message: 'needs SPILLWAY_ENCRYPTION_KEY' }],
    })
  }
  const wanted = { queue, namespace, task, options: given }
  const configured = principal.roles.has('operate') ? await queues.configure(wanted) : await queues.create(wanted)
  if (configured === null) {
    const detail = `The queue ${JSON.stringify(queue)} exists. Changing it needs the role operate.`
    throw new ProblemError({ code: 'forbidden', detail })
  }
  return { configured: true, ...configured, options: { ...queueOptionDefaults, ...configured.options } }
}
