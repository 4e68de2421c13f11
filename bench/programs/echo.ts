/** The bare echo: parse, validate, answer. What no server on this stack can exceed. */
import { handlerApp, listen } from './handler-app.js'

await listen(handlerApp(null))
