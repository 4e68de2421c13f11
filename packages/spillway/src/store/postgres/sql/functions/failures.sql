-- The last error of operations that failed (tables/0007-failures.sql), and dead letters that nobody needs because the
-- caller was answered.

-- In the statement of the settlement that records the failures. Nothing if that was refused: then p_lost has fences.
CREATE OR REPLACE FUNCTION failures_keep(
  p_lost bigint[], p_ids uuid[], p_attempts int[], p_codes text[], p_statuses smallint[], p_keep boolean[],
  p_stacks text[]
) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  IF cardinality(p_lost) > 0 THEN RETURN; END IF;
  INSERT INTO failures AS f (id, attempt, code, http_status, keep_letter, stack, sweep_at)
    SELECT u.id, u.attempt, u.code, u.status, u.keep, u.stack, t + interval '1 hour'
    FROM unnest(p_ids, p_attempts, p_codes, p_statuses, p_keep, p_stacks) u(id, attempt, code, status, keep, stack)
    ORDER BY u.id
    ON CONFLICT (id) DO UPDATE SET attempt = excluded.attempt, code = excluded.code,
      http_status = excluded.http_status, keep_letter = excluded.keep_letter, stack = excluded.stack;
END $$;

-- A caller that waited for a queued operation was answered with what its handler said (FailOperation): its dead letter
-- becomes history. Nothing if it was redriven meanwhile, or if the handler wants the letter.
CREATE OR REPLACE FUNCTION letter_answered(p_id uuid) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  WITH gone AS (
    DELETE FROM dead_letters d USING failures f
    WHERE d.id = p_id AND f.id = d.id AND f.attempt = d.attempts AND f.code IS NOT NULL AND NOT f.keep_letter
    RETURNING d.*
  )
  INSERT INTO history (id, finished_at, status, type, queue, partition, priority, identity, accepted_at, started_at,
      attempts, max_attempts, error, result, trace)
    SELECT g.id, g.died_at, 'failed', g.type, g.queue, g.partition, g.priority, g.identity, g.accepted_at, g.started_at,
      g.attempts, g.max_attempts, g.error, g.result, g.trace
    FROM gone g;
  IF FOUND THEN PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, '!dead', -1); END IF;
END $$;

-- Removes those whose operation is gone; looks at the others again later. Returns how many went, and whether there may
-- be more.
CREATE OR REPLACE FUNCTION failures_sweep(p_rows int, OUT failures int, OUT is_full boolean)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_looked int;
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  WITH old AS MATERIALIZED (
    SELECT x.ctid AS at, EXISTS (SELECT FROM ops o WHERE o.id = x.id)
      OR EXISTS (SELECT FROM dead_letters d WHERE d.id = x.id)
      OR EXISTS (SELECT FROM history h WHERE h.id = x.id) AS is_needed
    FROM failures x WHERE x.sweep_at < t ORDER BY x.sweep_at LIMIT p_rows FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM failures d WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o WHERE NOT o.is_needed)) RETURNING 1
  ), kept AS (
    UPDATE failures d SET sweep_at = t + interval '1 hour'
      WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o WHERE o.is_needed))
  ) SELECT (SELECT count(*) FROM gone), count(*) INTO failures, v_looked FROM old o;
  is_full := v_looked >= p_rows;
END $$;
