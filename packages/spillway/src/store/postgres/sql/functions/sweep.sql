-- Removes expired rows and makes and drops partitions of history. Who calls it, and how often: maintenance/sweeps.ts.
--
-- A batch is a short transaction: it takes due rows in the order of an index on their time, skips locked rows, and
-- does not wait for the disk (a removal that a crash loses is done again). Rows that are still in use get a new time.
-- A batch begins where the one before it ended, because dead entries of the index stay until a vacuum; skipped rows
-- come with the next round, which begins at the start.

-- Takes the turn, for p_hold_ms if nothing is heard again. 0: it is ours; else how long to wait, in milliseconds.
CREATE OR REPLACE FUNCTION sweep_take(p_hold_ms bigint) RETURNS bigint
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  UPDATE sweep_turn x SET next_at = clock_timestamp() + p_hold_ms * interval '1 ms'
    WHERE x.next_at <= clock_timestamp();
  RETURN CASE WHEN FOUND THEN 0
    ELSE (SELECT greatest(1, ceil(extract(epoch FROM x.next_at - clock_timestamp()) * 1000)) FROM sweep_turn x) END;
END $$;

-- Gives the turn back: nobody sweeps for p_rest_ms.
CREATE OR REPLACE FUNCTION sweep_rest(p_rest_ms bigint) RETURNS void
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  UPDATE sweep_turn SET next_at = clock_timestamp() + p_rest_ms * interval '1 ms'
$$;

-- History comes and goes by whole partitions.
CREATE OR REPLACE FUNCTION sweep_history(
  p_retention_ms bigint, p_rows int
) RETURNS TABLE (partitions_made int, partitions_dropped int, history int)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_width interval := greatest(60000, p_retention_ms / 6) * interval '1 ms';
  v_from timestamptz; v_name text; r record;
BEGIN
  partitions_made := 0; partitions_dropped := 0; history := 0;
  -- One at a time; the others have nothing to add.
  IF NOT pg_try_advisory_xact_lock(hashtext('spillway.sweep'), hashtext(current_schema())) THEN
    RETURN NEXT;
    RETURN;
  END IF;
  PERFORM set_config('lock_timeout', '500ms', true);
  -- Where nothing covers the present yet, rows go to the rest meanwhile: the first partition begins a little later.
  v_from := greatest(t + interval '10 seconds', (SELECT max(s.to_at) FROM history_spans s));
  WHILE v_from < t + 2 * v_width LOOP
    -- Rows that fell into the rest would overlap with a partition that starts before them.
    IF EXISTS (SELECT FROM history_rest h WHERE h.finished_at >= v_from) THEN
      v_from := t + interval '10 seconds';
    END IF;
    v_name := 'history_' || to_char(v_from AT TIME ZONE 'UTC', 'YYYYMMDDHH24MISSMS');
    EXECUTE format('CREATE TABLE %I PARTITION OF history FOR VALUES FROM (%L) TO (%L)', v_name, v_from,
        v_from + v_width);
    INSERT INTO history_spans (name, from_at, to_at) VALUES (v_name, v_from, v_from + v_width);
    partitions_made := partitions_made + 1;
    v_from := v_from + v_width;
  END LOOP;
  FOR r IN SELECT s.name FROM history_spans s WHERE s.to_at < t - p_retention_ms * interval '1 ms' LOOP
    EXECUTE format('DROP TABLE IF EXISTS %I', r.name);
    DELETE FROM history_spans s WHERE s.name = r.name;
    partitions_dropped := partitions_dropped + 1;
  END LOOP;
  DELETE FROM history_rest h
    WHERE h.ctid = ANY (ARRAY(SELECT x.ctid FROM history_rest x
          WHERE x.finished_at < t - p_retention_ms * interval '1 ms' ORDER BY x.finished_at LIMIT p_rows));
  GET DIAGNOSTICS history = ROW_COUNT;
  RETURN NEXT;
END $$;

-- p_from: where to begin, of each table. A batch is full when one of them had more than it took.
CREATE OR REPLACE FUNCTION sweep_rows(
  p_rows int, p_from timestamptz[] DEFAULT '{-infinity,-infinity,-infinity}',
  OUT keys int, OUT rate_rows int, OUT lanes int, OUT cancels int, OUT is_full boolean, OUT upto timestamptz[]
)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_keys int; v_rates int; v_lanes int; v_key timestamptz; v_rate timestamptz; v_lane timestamptz;
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  WITH old AS MATERIALIZED (
    SELECT x.ctid AS at, x.expires_at FROM idempotency x WHERE x.expires_at >= p_from[1] AND x.expires_at < t
      ORDER BY x.expires_at LIMIT p_rows FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM idempotency d WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o)) RETURNING 1
  ) SELECT (SELECT count(*) FROM gone), count(*), coalesce(max(o.expires_at), p_from[1]) INTO keys, v_keys, v_key
  FROM old o;

  WITH old AS MATERIALIZED (
    SELECT x.ctid AS at, x.sweep_at, x.expires_at < t AS is_over FROM rates x
      WHERE x.sweep_at >= p_from[2] AND x.sweep_at < t ORDER BY x.sweep_at LIMIT p_rows FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM rates d WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o WHERE o.is_over)) RETURNING 1
  ), kept AS (
    UPDATE rates d SET sweep_at = d.expires_at WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o WHERE NOT o.is_over))
  ) SELECT (SELECT count(*) FROM gone), count(*), coalesce(max(o.sweep_at), p_from[2])
  INTO rate_rows, v_rates, v_rate FROM old o;

  -- Lanes that have been empty for an hour start again at 1 when they come back: nothing refers to their old numbers
  -- (dead letters would, so theirs stay).
  WITH old AS MATERIALIZED (
    SELECT x.ctid AS at, x.sweep_at, x.depth = 0 AND x.moved_at < t - interval '1 hour'
      AND NOT EXISTS (SELECT FROM dead_letters k WHERE k.lane = x.id) AS is_over
    FROM lanes x WHERE x.sweep_at >= p_from[3] AND x.sweep_at < t ORDER BY x.sweep_at LIMIT p_rows
    FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM lanes d WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o WHERE o.is_over)) RETURNING 1
  ), kept AS (
    UPDATE lanes d
      SET sweep_at = CASE WHEN d.depth = 0 AND d.moved_at > t - interval '1 hour' THEN d.moved_at
        ELSE t END + interval '1 hour'
      WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o WHERE NOT o.is_over))
  ) SELECT (SELECT count(*) FROM gone), count(*), coalesce(max(o.sweep_at), p_from[3]) INTO lanes, v_lanes, v_lane
  FROM old o;

  DELETE FROM cancels d
    WHERE d.ctid = ANY (ARRAY(SELECT x.ctid FROM cancels x WHERE x.asked_at < t - interval '10 minutes'
          ORDER BY x.asked_at LIMIT p_rows FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS cancels = ROW_COUNT;
  upto := ARRAY[v_key, v_rate, v_lane];
  is_full := greatest(v_keys, v_rates, v_lanes, cancels) >= p_rows;
END $$;
