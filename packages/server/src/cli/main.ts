#!/usr/bin/env node
import { runCli } from './program.js'
import { processTerminal } from './terminal.js'

// `spillway ops list | head`: the reader closed the pipe, which is not an error.
process.stdout.on('error', (error: NodeJS.ErrnoException) => {
  if (error.code !== 'EPIPE') throw error
  process.exit(0)
})

process.exitCode = await runCli(process.argv.slice(2), processTerminal)
