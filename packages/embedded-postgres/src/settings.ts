export type ServerSettings = Readonly<Record<string, string>>

const GIB = 1024 ** 3

/**
 * A new WAL segment stalls commits for 44–101 ms on the machine this was measured on; keeping gigabytes of recycled ones
 * avoids that. At most a tenth of the free disk space.
 */
export function walSizes(freeBytes: number): { min: string; max: string } {
  if (freeBytes >= 40 * GIB) return { min: '2GB', max: '4GB' }
  if (freeBytes >= 20 * GIB) return { min: '1GB', max: '2GB' }
  if (freeBytes >= 5 * GIB) return { min: '256MB', max: '512MB' }
  return { min: '80MB', max: '256MB' }
}

export function serverSettings(options: {
  port: number
  freeBytes: number
  totalMemoryBytes: number
  overrides?: ServerSettings
}): ServerSettings {
  const wal = walSizes(options.freeBytes)
  return {
    shared_buffers: options.totalMemoryBytes >= 4 * GIB ? '256MB' : '128MB',
    max_connections: '200',
    min_wal_size: wal.min,
    max_wal_size: wal.max,
    checkpoint_timeout: '15min',
    // Compressing page images costs CPU that Node.js needs, and saves a local disk that is not the bottleneck.
    wal_compression: 'off',
    // The hot tables churn: at the default of 60 s they grow to 169 MB of dead rows, at 5 s they stay at 14 MB.
    autovacuum_naptime: '5s',
    autovacuum_vacuum_cost_delay: '0',
    // Every statement is short: parallel and compiled plans only cost time, and parallel workers need more /dev/shm than a
    // container has.
    jit: 'off',
    max_parallel_workers_per_gather: '0',
    timezone: 'UTC',
    log_timezone: 'UTC',
    lc_messages: 'C',
    log_min_messages: 'error',
    // Statements carry callers' payloads, which do not belong in a log.
    log_min_error_statement: 'panic',
    log_error_verbosity: 'terse',
    log_checkpoints: 'off',
    ...options.overrides,
    // Cannot be overridden: the guarantees depend on the first three, the starter on the rest.
    fsync: 'on',
    synchronous_commit: 'on',
    full_page_writes: 'on',
    listen_addresses: '127.0.0.1',
    unix_socket_directories: '',
    port: String(options.port),
    password_encryption: 'scram-sha-256',
    logging_collector: 'off',
    log_destination: 'stderr',
    log_line_prefix: '%m [%p] %e ',
  }
}

export function toArguments(settings: ServerSettings): string[] {
  return Object.entries(settings).flatMap(([name, value]) => ['-c', `${name}=${value}`])
}
