import { createRequire } from 'node:module'

// The same relative path from src and from dist.
const manifest: unknown = createRequire(import.meta.url)('../package.json')

export const version: string =
  typeof manifest === 'object' && manifest !== null && 'version' in manifest ? String(manifest.version) : 'unknown'
