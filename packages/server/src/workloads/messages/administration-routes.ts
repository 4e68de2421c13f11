/** The operators' routes of contract §4: reading, moving, deleting. Pushing and consuming are in routes.ts. */

import type { FastifyLike as App } from 'spillway/workload'
import { jsonOf, refuseUntilReady } from 'spillway/workload'
import { Administration } from './administration.js'
import { type AdministrationHooks, administrationSetting } from './administration-setting.js'
import { consumerGroupRoutes } from './consumer-group-routes.js'
import type { MessagesWorkload } from './index.js'
import { messageLogRoutes } from './message-log-routes.js'
import type { MessagesOptions } from './options.js'
import { queueRoutes } from './queue-routes.js'

export type { AdministrationHooks } from './administration-setting.js'

export function messageAdministrationRoutes(
  {
    intake,
    options,
    seal,
  }: Pick<MessagesWorkload, 'intake' | 'seal'> & {
    options: Pick<MessagesOptions, 'schema' | 'pageBytesMax'>
  },
  hooks: AdministrationHooks,
): (app: App) => Promise<void> {
  const administration = new Administration({ intake, schema: options.schema, seal })
  const setting = administrationSetting(administration, hooks, options.pageBytesMax)
  return async (app) => {
    app.setSerializerCompiler(() => jsonOf)
    refuseUntilReady(app, intake.core)
    queueRoutes(app, setting)
    messageLogRoutes(app, setting)
    consumerGroupRoutes(app, setting)
  }
}
