/** The registry of blocks. Changes have medium priority and count per identity; reads work in any state. */
import { BlockPage, BlockView, CreateBlock, ListBlocksQuery, PutBlock } from '@spillway/protocol/schema'
import { routingLimits } from '@spillway/protocol/wire'
import type { FastifyLike as App, Wire } from 'spillway/workload'
import { mountedRoute, type Problem, sendProblem } from 'spillway/workload'
import Type, { type Static } from 'typebox'
import type { RoutingParts } from './context.js'
import { type Gateway, refuse } from './gateway.js'
import { type BlockOutcome, checkBlock, Registry } from './registry.js'
import { anyone, operate, options, pageByNames } from './route-options.js'

const path = '/api/v1/registry/blocks'
const onePath = `${path}/:type/:version`
const Params = Type.Object({ type: Type.String(), version: Type.String() })
const notFound: Problem = { code: 'not_found', detail: 'There is no such block.' }

export function addBlocks(app: App, parts: RoutingParts, gateway: Gateway): void {
  const registry = new Registry(parts)
  addChanges(app, registry, gateway)
  addReads(app, registry, parts.config.server.pageBytesMax)
}

function addChanges(app: App, registry: Registry, gateway: Gateway): void {
  const creation = gateway.registryMount(async (body) => {
    const checked = checkBlock(body)
    return checked.ok ? written(await registry.create(checked.block)) : invalid(checked.errors)
  })
  const replacement = gateway.registryMount(async (body, { type = '', version = '' }) => {
    const checked = checkBlock(body, { type, version })
    return checked.ok ? written(await registry.put(checked.block)) : invalid(checked.errors)
  })
  const removal = gateway.registryMount(async (_, { type = '', version = '' }) => {
    const removed = await registry.remove({ type, version })
    return removed ? { ok: true, answer: { status: 204, headers: {}, body: undefined } } : refuse(notFound)
  })
  const replaced = { 200: BlockView, 201: BlockView }
  app.route({
    ...{ method: 'POST', url: path, ...mountedRoute(creation, CreateBlock) },
    ...options(operate, 'Register a block', { body: CreateBlock }, { 201: BlockView }),
  })
  app.route({
    ...{ method: 'PUT', url: onePath, ...mountedRoute(replacement, PutBlock) },
    ...options(operate, 'Register a block, or replace it', { params: Params, body: PutBlock }, replaced),
  })
  app.route({
    ...{ method: 'DELETE', url: onePath, ...mountedRoute(removal, Type.Unknown()) },
    ...options(operate, 'Remove a block', { params: Params }),
  })
}

function addReads(app: App, registry: Registry, bytesMax: number): void {
  app.get<{ Querystring: Static<typeof ListBlocksQuery> }>(
    path,
    options(anyone, 'Blocks, by type and version', { querystring: ListBlocksQuery }, { 200: BlockPage }),
    async ({ query }) =>
      pageByNames(
        query,
        bytesMax,
        (bounds, from) =>
          registry.list(bounds, { type: query.type, after: from && { type: from[0], version: from[1] } }),
        (block) => [block.type, block.version],
      ),
  )
  app.get<{ Params: { type: string; version: string } }>(
    onePath,
    options(anyone, 'A block', { params: Params }, { 200: BlockView }),
    async (request, reply) => (await registry.get(request.params)) ?? sendProblem(reply, notFound),
  )
}

function written(outcome: BlockOutcome): Wire {
  if ('block' in outcome) {
    const status = outcome.kind === 'created' ? 201 : 200
    return { ok: true, answer: { status, headers: {}, body: outcome.block } }
  }
  const exists = 'There is a block of this type and version; PUT replaces it.'
  const full = `There are ${routingLimits.blocksMax} blocks already; remove one first.`
  return refuse({ code: 'conflict', detail: outcome.kind === 'exists' ? exists : full })
}

function invalid(errors: readonly { path: string; message: string }[]): Wire {
  return refuse({ code: 'schema_validation_failed', detail: 'The block is not valid.', errors })
}
