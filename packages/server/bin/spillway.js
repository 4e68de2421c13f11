#!/usr/bin/env node
// A file of its own, in git: npm links commands when it installs, and in a fresh clone nothing is built yet by then.
import '../dist/cli/main.js'
