-- Writes, reads and watches streams.
--
-- A record is written only directly after a record that is not an end. So a log has neither holes nor anything after
-- its end, whatever a writer believes.

CREATE OR REPLACE FUNCTION stream_born(p_ms bigint) RETURNS timestamptz
  LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT to_timestamp(p_ms::float8 / 1000) $$;

-- Writes records, given in the order of stream and number; which of them are there as this writer gave them. p_texts:
-- the records' chunks, with E'\x1d' between the records. p_levels: how many records of its stream stand before it in
-- the call.
-- Those may be lost to another writer, whose record may end just where theirs would have: what stands behind them
-- goes behind this writer's own only. Looking for the record before each costs more than all the rest, so that the
-- adapter takes this way only where it does not know that record to be there.
CREATE OR REPLACE FUNCTION stream_append(
   p_streams uuid[], p_borns bigint[], p_firsts int[], p_lasts int[], p_writers text[], p_ends text[], p_texts text,
  p_levels int[]
) RETURNS boolean[]
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_texts text[] := string_to_array(p_texts, E'\x1d');
  v_written boolean[];
BEGIN
  FOR v_level IN 0 .. (SELECT max(l) FROM unnest(p_levels) l) LOOP
    INSERT INTO stream_chunks (stream, born_at, first, last, writer, chunks, ended)
      SELECT g.stream, s.born_at, g.first, g.last, g.writer, g.chunks, g.ended
      FROM unnest(p_streams, p_borns, p_firsts, p_lasts, p_writers, p_ends, v_texts, p_levels) g(stream, born, first,
          last, writer, ended, chunks, level)
      JOIN streams s ON s.id = g.stream AND s.born_at = stream_born(g.born) AND s.ended IS NULL
      LEFT JOIN LATERAL (
        SELECT x.last, x.writer, x.ended FROM stream_chunks x
        WHERE x.stream = s.id AND x.born_at = s.born_at AND x.first < g.first ORDER BY x.first DESC LIMIT 1
      ) b ON true
      WHERE g.level = v_level AND g.first = coalesce(b.last, 0) + 1 AND b.ended IS NULL
        AND (v_level = 0 OR b.writer = g.writer)
      ON CONFLICT DO NOTHING;
  END LOOP;
  v_written := ARRAY(
    SELECT EXISTS (
      SELECT FROM stream_chunks x
      WHERE x.stream = g.stream AND x.first = g.first AND x.born_at = stream_born(g.born) AND x.last = g.last
        AND x.writer = g.writer
        AND x.ended IS NOT DISTINCT FROM g.ended
    )
    FROM unnest(p_streams, p_borns, p_firsts, p_lasts, p_writers, p_ends) WITH ORDINALITY g(stream, born, first,
        last, writer, ended, n) ORDER BY g.n);
  UPDATE streams s SET ended = g.ended, ended_at = clock()
    FROM unnest(p_streams, p_ends, v_written) g(stream, ended, written)
    WHERE g.written AND g.ended IS NOT NULL AND s.id = g.stream AND s.ended IS NULL;
  RETURN v_written;
END $$;

CREATE OR REPLACE FUNCTION stream_entries(
  p_ids uuid[]
)
RETURNS TABLE ( id uuid, identity text, format text, thread_id text, log text, direct boolean, born_ms bigint,
    age_ms float8, ended text, ended_ms_ago float8, last int )
  LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT s.id, s.identity, s.format, s.thread_id, s.log, s.direct, (extract(epoch FROM s.born_at) * 1000)::bigint,
    extract(epoch FROM c.t - s.born_at)::float8 * 1000, s.ended, extract(epoch FROM c.t - s.ended_at)::float8 * 1000,
      coalesce(h.last, 0)
  FROM clock() c(t), unnest(p_ids) u(id) JOIN streams s ON s.id = u.id
  LEFT JOIN LATERAL (
    SELECT x.last FROM stream_chunks x WHERE s.log = 'postgres' AND x.stream = s.id AND x.born_at = s.born_at
      ORDER BY x.first DESC LIMIT 1
  ) h ON true
$$;

-- Makes those known that are not, and answers what is known of all.
CREATE OR REPLACE FUNCTION stream_open(
   p_ids uuid[], p_identities text[], p_formats text[], p_threads text[], p_logs text[], p_directs boolean[],
  p_watchers uuid[], p_ms_ago bigint[]
)
RETURNS TABLE ( created boolean, id uuid, identity text, format text, thread_id text, log text, direct boolean,
    born_ms bigint, age_ms float8, ended text, ended_ms_ago float8, last int )
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_made uuid[];
BEGIN
  WITH made AS (
    INSERT INTO streams (id, identity, format, thread_id, log, direct, born_at, watcher)
      SELECT g.id, g.identity, g.format, g.thread_id, g.log, g.direct,
        date_trunc('milliseconds', clock() - g.ms_ago * interval '1 ms'), g.watcher
      FROM unnest(p_ids, p_identities, p_formats, p_threads, p_logs, p_directs, p_watchers, p_ms_ago) g(id, identity,
          format, thread_id, log, direct, watcher, ms_ago)
      ORDER BY g.id
      ON CONFLICT DO NOTHING
      RETURNING id
  )
  SELECT coalesce(array_agg(m.id), '{}') INTO v_made FROM made m;
  -- A snapshot of its own: it sees those whom somebody else has just made known.
  RETURN QUERY SELECT e.id = ANY (v_made), e.* FROM stream_entries(p_ids) e;
END $$;

-- A client reads it through that process now (p_reads), or has left it. Leaving is for who is still the one: false
-- where somebody else reads it.
CREATE OR REPLACE FUNCTION stream_watch(p_ids uuid[], p_watchers uuid[], p_reads boolean[]) RETURNS boolean[]
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  WITH held AS (
    SELECT s.id, g.watcher, g.reads FROM unnest(p_ids, p_watchers, p_reads) g(id, watcher, reads)
    JOIN streams s ON s.id = g.id AND (g.reads OR s.watcher = g.watcher) ORDER BY s.id FOR NO KEY UPDATE OF s
  ), changed AS (
    UPDATE streams s
      SET watcher = CASE WHEN h.reads THEN h.watcher END, unwatched_at = CASE WHEN NOT h.reads THEN clock() END
    FROM held h WHERE s.id = h.id AND (h.reads OR s.watcher = h.watcher) RETURNING s.id
  )
  SELECT ARRAY(
    SELECT EXISTS (SELECT FROM changed c WHERE c.id = g.id) FROM unnest(p_ids) WITH ORDINALITY g(id, n) ORDER BY g.n
  )
$$;

CREATE OR REPLACE FUNCTION stream_ended(p_ids uuid[], p_ends text[]) RETURNS void
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  WITH held AS (
    SELECT s.id, g.ended FROM unnest(p_ids, p_ends) g(id, ended) JOIN streams s ON s.id = g.id AND s.ended IS NULL
      ORDER BY s.id FOR NO KEY UPDATE OF s
  )
  UPDATE streams s SET ended = h.ended, ended_at = clock() FROM held h WHERE s.id = h.id AND s.ended IS NULL
$$;

-- Of these, those that nobody reads. One whose process is gone is unwatched from now on: when it went, nobody knows.
CREATE OR REPLACE FUNCTION stream_abandoned(p_ids uuid[]) RETURNS TABLE (id uuid, for_ms float8)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  WITH held AS (
    SELECT s.id FROM streams s
      WHERE s.id = ANY (p_ids) AND s.watcher IS NOT NULL AND NOT EXISTS (SELECT FROM workers w WHERE w.id = s.watcher)
    ORDER BY s.id FOR NO KEY UPDATE OF s
  )
  UPDATE streams s SET watcher = NULL, unwatched_at = clock() FROM held h
    WHERE s.id = h.id AND NOT EXISTS (SELECT FROM workers w WHERE w.id = s.watcher);
  RETURN QUERY SELECT s.id, greatest(0, extract(epoch FROM clock() - s.unwatched_at)::float8 * 1000) FROM streams s
    WHERE s.id = ANY (p_ids) AND s.unwatched_at IS NOT NULL;
END $$;

-- Streams without an end whose operation left the queue more than p_grace_ms ago: the process that ran or cancelled it
-- died before it wrote one, or could not. One process looks for all, every p_every_ms; the others find none.
CREATE OR REPLACE FUNCTION stream_orphans(p_every_ms bigint, p_grace_ms bigint, p_most int)
RETURNS TABLE ( id uuid, identity text, format text, thread_id text, log text, direct boolean,
    born_ms bigint, age_ms float8, ended text, ended_ms_ago float8, last int )
  LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_hashjoin = off SET enable_mergejoin = off
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
  v_since timestamptz := clock() - p_grace_ms * interval '1 ms';
BEGIN
  INSERT INTO stream_look AS x (next_at) VALUES (clock_timestamp() + p_every_ms * interval '1 ms')
    ON CONFLICT (one) DO UPDATE SET next_at = excluded.next_at WHERE x.next_at <= clock_timestamp();
  IF NOT FOUND THEN RETURN; END IF;
  -- The operation is written before its stream: where there is none, it has left.
  RETURN QUERY SELECT e.* FROM stream_entries(ARRAY(
    SELECT s.id FROM streams s
    WHERE s.ended_at IS NULL AND s.born_at < v_since AND NOT EXISTS (SELECT FROM ops o WHERE o.id = s.id)
      AND NOT EXISTS (SELECT FROM history h WHERE h.id = s.id AND h.finished_at > v_since)
      AND NOT EXISTS (SELECT FROM dead_letters d WHERE d.id = s.id AND d.died_at > v_since)
    ORDER BY s.born_at LIMIT p_most)) e;
END $$;
