/** Milliseconds since the epoch, with fractions: what one process does in one millisecond still has an order. */
export const now = (): number => performance.timeOrigin + performance.now()
