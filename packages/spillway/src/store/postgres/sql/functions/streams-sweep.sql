-- Makes and drops the partitions of stream records, and forgets streams whose retention is over.
--
-- Three kinds of short transactions, because making a partition locks the default partition, dropping one locks all of
-- them, and an append that waits for one may hold what the other waits for.

-- NULL: another process sweeps.
CREATE OR REPLACE FUNCTION stream_sweep_lock() RETURNS boolean
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT set_config('lock_timeout', '500ms', true) IS NOT NULL
    AND pg_try_advisory_xact_lock(hashtext('spillway.streams'), hashtext(current_schema()))
$$;

CREATE OR REPLACE FUNCTION stream_sweep_entries(p_retention_ms bigint, p_longest_ms bigint, p_rows int) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  v_kept timestamptz := clock() - p_retention_ms * interval '1 ms';
  v_ended int; v_left int;
BEGIN
  IF NOT stream_sweep_lock() THEN RETURN NULL; END IF;
  DELETE FROM streams s
    WHERE s.ctid = ANY (ARRAY(SELECT x.ctid FROM streams x WHERE x.ended_at < v_kept LIMIT p_rows
          FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS v_ended = ROW_COUNT;
  DELETE FROM streams s WHERE s.ctid = ANY (ARRAY(SELECT x.ctid FROM streams x
    WHERE x.ended_at IS NULL AND x.born_at < v_kept - p_longest_ms * interval '1 ms' LIMIT p_rows
    FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS v_left = ROW_COUNT;
  RETURN v_ended + v_left;
END $$;

CREATE OR REPLACE FUNCTION stream_sweep_ahead(p_kept_ms bigint) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  t timestamptz := clock();
  v_width interval := greatest(60000, p_kept_ms / 6) * interval '1 ms';
  v_from timestamptz; v_name text; v_made int := 0;
BEGIN
  IF NOT stream_sweep_lock() THEN RETURN NULL; END IF;
  -- Where nothing covers the present yet, records go to the rest meanwhile: the first partition begins a little later.
  v_from := date_trunc('milliseconds', greatest(t + interval '10 seconds', (SELECT max(s.to_at) FROM stream_spans s)));
  WHILE v_from < t + 2 * v_width LOOP
    -- Records in the rest would overlap with a partition that starts before them.
    IF EXISTS (SELECT FROM stream_chunks_rest c WHERE c.born_at >= v_from) THEN
      v_from := date_trunc('milliseconds', t + interval '10 seconds');
    END IF;
    v_name := 'stream_chunks_' || to_char(v_from AT TIME ZONE 'UTC', 'YYYYMMDDHH24MISSMS');
    -- Its rows are never changed, and it is dropped long before they would have to be frozen: nothing to vacuum.
    EXECUTE format(
      'CREATE TABLE %I PARTITION OF stream_chunks FOR VALUES FROM (%L) TO (%L) '
        'WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off)',
      v_name, v_from, v_from + v_width);
    INSERT INTO stream_spans (name, from_at, to_at) VALUES (v_name, v_from, v_from + v_width);
    v_made := v_made + 1;
    v_from := v_from + v_width;
  END LOOP;
  RETURN v_made;
END $$;

-- Records whose streams are all forgotten. p_kept_ms: the longest that a stream may last, and its retention.
CREATE OR REPLACE FUNCTION stream_sweep_behind(p_kept_ms bigint, p_rows int) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  v_before timestamptz := clock() - p_kept_ms * interval '1 ms';
  r record; v_dropped int := 0;
BEGIN
  IF NOT stream_sweep_lock() THEN RETURN NULL; END IF;
  FOR r IN SELECT p.name FROM stream_spans p WHERE p.to_at < v_before
    AND NOT EXISTS (SELECT FROM streams s WHERE s.born_at >= p.from_at AND s.born_at < p.to_at AND s.log = 'postgres')
  LOOP
    EXECUTE format('DROP TABLE IF EXISTS %I', r.name);
    DELETE FROM stream_spans p WHERE p.name = r.name;
    v_dropped := v_dropped + 1;
  END LOOP;
  DELETE FROM stream_chunks_rest c WHERE c.ctid = ANY (ARRAY(SELECT x.ctid FROM stream_chunks_rest x
    WHERE x.born_at < v_before AND NOT EXISTS (SELECT FROM streams s WHERE s.id = x.stream) LIMIT p_rows));
  RETURN v_dropped;
END $$;
