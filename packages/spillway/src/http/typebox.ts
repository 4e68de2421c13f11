/** Enables schemas: typebox is an optional peer that takes 0.2 s to import, so the library imports this file when it starts. */
import * as typebox from 'typebox/compile'
import { useTypebox } from './validation.js'

useTypebox(typebox)
