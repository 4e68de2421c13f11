/**
 * These prefixes are ours, so an unknown variable with one of them is a mistake. STREAM_, GATEWAY_ and ALERT_ are not
 * included: other programs use them too, and their variables must not stop our start.
 */
const ownPrefix = /^(?:SPILLWAY|PETITION|ROUTER|QUEUE_FAILOVER|GENERATION|CONNECTION_POOL)_/u

export function isOwnName(name: string): boolean {
  return ownPrefix.test(name)
}

const serviceName = /_SERVICE_(?:HOST|PORT(?:_[A-Z0-9_]+)?)$/u
const servicePortName = /_PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?$/u
const serviceAddress = /^(?:tcp|udp|sctp):\/\//u

/**
 * Kubernetes gives each pod variables for every Service of its namespace, in the form of Docker links. A Service named
 * "spillway" therefore sets SPILLWAY_PORT=tcp://10.0.0.1:7745, which is not meant as a setting.
 */
export function isInjectedByKubernetes(name: string, value: string): boolean {
  if (serviceName.test(name) || servicePortName.test(name)) return true
  return name.endsWith('_PORT') && serviceAddress.test(value)
}

function editDistance(a: string, b: string): number {
  let previous = Array.from({ length: b.length + 1 }, (_, column) => column)
  for (let row = 1; row <= a.length; row++) {
    const current = [row]
    for (let column = 1; column <= b.length; column++) {
      const substituted = (previous[column - 1] ?? 0) + (a[row - 1] === b[column - 1] ? 0 : 1)
      current.push(Math.min(substituted, (previous[column] ?? 0) + 1, (current[column - 1] ?? 0) + 1))
    }
    previous = current
  }
  return previous[b.length] ?? 0
}

/** The known name that was probably meant, or null if none is close enough. */
export function nearestName(name: string, known: Iterable<string>): string | null {
  let best: string | null = null
  let bestDistance = Math.floor(name.length / 3) + 1
  for (const candidate of known) {
    const distance = editDistance(name, candidate)
    if (distance < bestDistance) {
      best = candidate
      bestDistance = distance
    }
  }
  return best
}
