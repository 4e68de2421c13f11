#!/usr/bin/env node
// The commands belong to the server's package. The library hands over to it where it is installed.
import { createRequire } from 'node:module'
import path from 'node:path'
import { pathToFileURL } from 'node:url'

/** From the folder where the command is run, then from beside this package. */
function serverManifest() {
  for (const from of [path.join(process.cwd(), 'package.json'), import.meta.url]) {
    try {
      return createRequire(from).resolve('@spillway/server/package.json')
    } catch {
      // Not installed there.
    }
  }
  return undefined
}

const manifest = serverManifest()
if (manifest === undefined) {
  console.error('The spillway command is part of @spillway/server, which is not installed here.')
  console.error('Run it once:   npx @spillway/server')
  console.error('Or install it: npm i @spillway/server')
  process.exitCode = 1
} else {
  await import(pathToFileURL(path.join(path.dirname(manifest), 'bin/spillway.js')).href)
}
