export interface Deferred<T> {
  readonly promise: Promise<T>
  resolve(value: T): void
}

/** What a test waits for, and something else makes happen. */
export function deferred<T = void>(): Deferred<T> {
  let resolve: (value: T) => void = () => undefined
  const promise = new Promise<T>((settle) => {
    resolve = settle
  })
  return { promise, resolve: (value) => resolve(value) }
}
