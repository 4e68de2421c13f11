import type { App } from './app.js'

function page(version: string, origin: string): string {
  const curl = `curl -X POST ${origin}/api/v1/operations \\
  -H 'content-type: application/json' \\
  -d '{"type":"http.request","queue":"demo","payload":
       {"url":"${origin}/demo/echo","body":{"hello":"world"}}}'`
  return `<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Spillway</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:3rem auto;padding:0 1rem}pre{font-size:.875rem;padding:1rem;border-radius:.25rem;background:#8882;white-space:pre-wrap;overflow-wrap:anywhere}</style>
<h1>Spillway ${version}</h1>
<p>The overload-safe front door of a service: every request is done, queued, or refused with a time to retry.</p>
<p>Hand over the first operation:</p>
<pre>${escapeHtml(curl)}</pre>
<p><a href="/demo">streaming demo</a> · <a href="/docs">API</a> · <a href="/health">health</a> · <a href="/metrics">metrics</a> · <a href="/openapi.json">OpenAPI</a></p>
</html>
`
}

function escapeHtml(text: string): string {
  return text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;').replaceAll('"', '&quot;')
}

const hostForm = /^[\w.-]+(:\d+)?$|^\[[0-9a-f:.]+\](:\d+)?$/i

/** The page may be reached under several names, so commands show the host that the browser used, if it is valid. */
export function originOf(host: string | undefined): string {
  return `http://${host !== undefined && hostForm.test(host) ? host : '127.0.0.1:7745'}`
}

export function addLanding(app: App, version: string): void {
  app.get('/', { config: { public: true } }, async (request, reply) => {
    reply.header('content-security-policy', "default-src 'none'; style-src 'unsafe-inline'")
    return reply.type('text/html; charset=utf-8').send(page(version, originOf(request.headers.host)))
  })
}
