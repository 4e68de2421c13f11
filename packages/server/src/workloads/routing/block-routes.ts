/** The registry of blocks. Changes have medium priority and count per identity; reads work in any state. */
import { BlockPage, BlockView, CreateBlock, ListBlocksQuery, PutBlock } from '@spillway/protocol/schema'
import type { FastifyLike as App, Wire } from 'spillway/workload'
import { mountedRoute, type Problem, sendProblem } from 'spillway/workload'
import Type, { type Static } from 'typebox'
import type { RoutingWorkload } from './index.js'
import { pageByNames } from './name-pages.js'
import { type BlockOutcome, checkBlock } from './registry.js'
import { anyone, operate, problems, tags } from './route-options.js'

const path = '/api/v1/registry/blocks'
const onePath = `${path}/:type/:version`
const Params = Type.Object({ type: Type.String(), version: Type.String() })
const notFound: Problem = { code: 'not_found', detail: 'There is no such block.' }

export function addBlocks(app: App, workload: RoutingWorkload): void {
  addChanges(app, workload)
  addReads(app, workload)
}

function addChanges(app: App, { registry, gateway }: RoutingWorkload): void {
  app.route({
    method: 'POST',
    url: path,
    ...mountedRoute(
      gateway.registryMount(async (body) => {
        const checked = checkBlock(body)
        return checked.ok ? written(await registry.create(checked.block)) : invalid(checked.errors)
      }),
      CreateBlock,
    ),
    schema: {
      ...{ tags, summary: 'Register a block', body: CreateBlock, response: { 201: BlockView, ...problems } },
    },
    config: operate,
  })
  app.route({
    method: 'PUT',
    url: onePath,
    ...mountedRoute(
      gateway.registryMount(async (body, { type = '', version = '' }) => {
        const checked = checkBlock(body, { type, version })
        return checked.ok ? written(await registry.put(checked.block)) : invalid(checked.errors)
      }),
      PutBlock,
    ),
    schema: {
      ...{ tags, summary: 'Register a block, or replace it', params: Params, body: PutBlock },
      response: { 200: BlockView, 201: BlockView, ...problems },
    },
    config: operate,
  })
  const removal = mountedRoute(
    gateway.registryMount(async (_, { type = '', version = '' }) => {
      const removed = await registry.remove({ type, version })
      return removed ? { ok: true, answer: { status: 204, headers: {}, body: undefined } } : refuse(notFound)
    }),
    Type.Unknown(),
  )
  app.route({
    method: 'DELETE',
    url: onePath,
    ...removal,
    schema: { tags, summary: 'Remove a block', params: Params },
    config: operate,
  })
}

function addReads(app: App, { registry, deps }: RoutingWorkload): void {
  const bytesMax = deps.settings.pageBytesMax
  app.get<{ Querystring: Static<typeof ListBlocksQuery> }>(
    path,
    {
      schema: {
        ...{ tags, summary: 'Blocks, by type and version', querystring: ListBlocksQuery },
        response: { 200: BlockPage, ...problems },
      },
      config: anyone,
    },
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
    {
      schema: { tags, summary: 'A block', params: Params, response: { 200: BlockView, ...problems } },
      config: anyone,
    },
    async (request, reply) => (await registry.get(request.params)) ?? sendProblem(reply, notFound),
  )
}

function written(outcome: BlockOutcome): Wire {
  switch (outcome.kind) {
    case 'created':
      return { ok: true, answer: { status: 201, headers: {}, body: outcome.block } }
    case 'replaced':
      return { ok: true, answer: { status: 200, headers: {}, body: outcome.block } }
    case 'exists':
      return refuse({ code: 'conflict', detail: 'There is a block of this type and version; PUT replaces it.' })
    case 'full':
      return refuse({ code: 'conflict', detail: `There are ${outcome.limit} blocks already; remove one first.` })
  }
}

function invalid(errors: readonly { path: string; message: string }[]): Wire {
  return refuse({ code: 'schema_validation_failed', detail: 'The block is not valid.', errors })
}

function refuse(problem: Problem): Wire {
  return { ok: false, problem, headers: {} }
}
