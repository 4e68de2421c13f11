/**
 * A signal that fires when the client leaves or the time is over. Not `AbortSignal.any` with `AbortSignal.timeout`: Node 20
 * may collect the unreferenced timeout, and then it never fires.
 */
export function deadline(ms: number, gone: AbortSignal): { signal: AbortSignal; clear(): void } {
  const controller = new AbortController()
  const end = (): void => controller.abort()
  const timer = setTimeout(() => controller.abort(new DOMException('the time is over', 'TimeoutError')), ms)
  if (gone.aborted) end()
  else gone.addEventListener('abort', end, { once: true })
  return {
    signal: controller.signal,
    clear: () => {
      clearTimeout(timer)
      gone.removeEventListener('abort', end)
    },
  }
}
