/** The registry of blocks. Changes have medium priority and count per identity; reads work in any state. */
import { BlockPage, BlockView, CreateBlock, ListBlocksQuery, PutBlock } from '@spillway/protocol/schema'
import { routingLimits } from '@spillway/protocol/wire'
import type { FastifyLike as App, Mount, Wire } from 'spillway/workload'
import { mountedRoute, type Problem } from 'spillway/workload'
import Type, { type TSchema } from 'typebox'
import type { Route } from '../../route-table.js'
import { type Gateway, refuse } from './gateway.js'
import { type BlockOutcome, checkBlock, type Registry } from './registry.js'
import { anyone, errorForm, operate, pageByNames, problem, type RoutesContext, route, tag } from './route-options.js'

const path = '/api/v1/registry/blocks'
const onePath = `${path}/:type/:version`
const Params = Type.Object({ type: Type.String(), version: Type.String() })
const notFound: Problem = { code: 'not_found', detail: 'There is no such block.' }

/** Changes pass gates, so each has a mount. */
export function addBlockChanges(app: App, registry: Registry, gateway: Gateway): void {
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
  const add = (method: string, url: string, mount: Mount, body: TSchema, schema: object, answers: object): void => {
    const response = { ...answers, '4xx': problem, '5xx': problem }
    const config = { ...operate, errorForm } as const
    app.route({ method, url, ...mountedRoute(mount, body), schema: { tags: [tag], ...schema, response }, config })
  }
  add('POST', path, creation, CreateBlock, { summary: 'Register a block', body: CreateBlock }, { 201: BlockView })
  const replacing = { summary: 'Register a block, or replace it', params: Params, body: PutBlock }
  add('PUT', onePath, replacement, PutBlock, replacing, { 200: BlockView, 201: BlockView })
  add('DELETE', onePath, removal, Type.Unknown(), { summary: 'Remove a block', params: Params }, {})
}

export const blockRoutes = (registry: Registry): Route<RoutesContext>[] => [
  route('GET', path, anyone, {
    summary: 'Blocks, by type and version',
    query: ListBlocksQuery,
    answer: BlockPage,
    handle: ({ config }, { query }) =>
      pageByNames(
        query,
        config.server.pageBytesMax,
        (bounds, from) =>
          registry.list(bounds, { type: query.type, after: from && { type: from[0], version: from[1] } }),
        (block) => [block.type, block.version],
      ),
  }),
  route('GET', onePath, anyone, {
    summary: 'A block',
    answer: BlockView,
    missing: 'block',
    handle: (_, { params }) => registry.get(params),
  }),
]

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
