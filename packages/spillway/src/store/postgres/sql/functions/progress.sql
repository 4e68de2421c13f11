-- Progress of running operations (tables/0008-progress.sql): written for all of a process at once, and removed with the
-- attempts that ended.

CREATE OR REPLACE FUNCTION progress_keep(
  p_ids uuid[], p_attempts int[], p_values real[], p_notes text[], p_ended uuid[]
) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  INSERT INTO progress AS p (id, attempt, value, note, at, sweep_at)
    SELECT u.id, u.attempt, u.value, u.note, t, t + interval '1 hour'
    FROM unnest(p_ids, p_attempts, p_values, p_notes) u(id, attempt, value, note) ORDER BY u.id
    -- A process that lost the operation may still have something to say of its own attempt.
    ON CONFLICT (id) DO UPDATE SET attempt = excluded.attempt, value = excluded.value, note = excluded.note, at = t
      WHERE p.attempt <= excluded.attempt;
  DELETE FROM progress p WHERE p.id = ANY (p_ended);
END $$;

-- Rows of processes that died. Returns how many went, and whether there may be more.
CREATE OR REPLACE FUNCTION progress_sweep(p_rows int, OUT progress int, OUT is_full boolean)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_looked int;
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  WITH old AS MATERIALIZED (
    SELECT x.ctid AS at, EXISTS (SELECT FROM ops o WHERE o.id = x.id) AS is_needed
    FROM progress x WHERE x.sweep_at < t ORDER BY x.sweep_at LIMIT p_rows FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM progress d WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o WHERE NOT o.is_needed)) RETURNING 1
  ), kept AS (
    UPDATE progress d SET sweep_at = t + interval '1 hour'
      WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o WHERE o.is_needed))
  ) SELECT (SELECT count(*) FROM gone), count(*) INTO progress, v_looked FROM old o;
  is_full := v_looked >= p_rows;
END $$;
