/** Loads the optional package @spillway/embedded-postgres on demand, so that others need not install it. */
import type { EmbeddedOptions, EmbeddedServer } from '@spillway/embedded-postgres'

type EmbeddedPackage = Pick<typeof import('@spillway/embedded-postgres'), 'startEmbedded'>

const packageName = '@spillway/embedded-postgres'

export async function startEmbedded(
  options: EmbeddedOptions,
  load: () => Promise<EmbeddedPackage> = () => import('@spillway/embedded-postgres'),
): Promise<EmbeddedServer> {
  const found = await required(load, `embedded() needs the package ${packageName}: npm i ${packageName}`)
  return found.startEmbedded(options)
}

/** Throws an error with this message if the package is not installed. */
export async function requireEmbedded(message: string): Promise<void> {
  await required(() => import('@spillway/embedded-postgres'), message)
}

function required(load: () => Promise<EmbeddedPackage>, message: string): Promise<EmbeddedPackage> {
  return load().catch((error: unknown) => {
    if (!isMissing(error)) throw error
    throw new Error(message, { cause: error })
  })
}

/** Only the package itself: the same code for a module inside it means a broken installation, and its own message says more. */
function isMissing(error: unknown): boolean {
  if (!(error instanceof Error) || !('code' in error)) return false
  return error.code === 'ERR_MODULE_NOT_FOUND' && error.message.includes(`'${packageName}'`)
}
