/**
 * Makes the write-ahead log's segments beforehand. A new segment of 16 MB has to be filled with zeros and made durable
 * while a commit waits for it; a server that has been running for a while has old ones to use again. Five minutes on a
 * server that was made a minute ago would measure the making.
 */
import pg from 'pg'

export async function prepareWal(url: string): Promise<void> {
  const client = new pg.Client({ connectionString: url })
  await client.connect()
  try {
    const { rows } = await client.query<{ segments: number }>(
      `SELECT (pg_size_bytes(current_setting('min_wal_size')) / pg_size_bytes(current_setting('wal_segment_size')))::int AS segments`,
    )
    for (let made = 0; made < (rows[0]?.segments ?? 0); made++) {
      // Switching an empty segment does nothing.
      await client.query(`SELECT pg_logical_emit_message(false, 'bench', '')`)
      await client.query('SELECT pg_switch_wal()')
    }
    // The checkpoint renames those that are no longer needed to those that will be.
    await client.query('CHECKPOINT')
  } finally {
    await client.end()
  }
}
