/** The promise's outcome, or what `onTimeout` returns or throws if the promise takes longer than `ms`. */
export async function withDeadline<T, Late>(
  promise: Promise<T>,
  ms: number,
  onTimeout: () => Late | Promise<Late>,
): Promise<T | Late> {
  let timer: NodeJS.Timeout | undefined
  const late = new Promise<void>((resolve) => {
    timer = setTimeout(resolve, ms)
  }).then(onTimeout)
  try {
    return await Promise.race([promise, late])
  } finally {
    clearTimeout(timer)
  }
}
