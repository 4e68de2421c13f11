-- Stores decisions with their idempotency keys, one call per flush.
--
-- The keys have a table of their own and do not use the core's idempotency. The core takes a key when it accepts an
-- operation, and may refuse the operation under load. Here the key arrives with a message that the broker has already
-- accepted, from any publisher: it must never be refused, and has no operation.

-- Per item: 'stored'; 'replay': its key has a decision already, which is returned; 'violation': its key belongs to
-- another task.
CREATE OR REPLACE FUNCTION rt_store_decisions(
  p_requests uuid[], p_tenants text[], p_traces text[], p_keys uuid[], p_tasks uuid[], p_decisions text[],
  p_decision_ms bigint, p_key_ms bigint
) RETURNS TABLE (verdict text, decision json)
  LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_mine uuid[];
  v_verdicts text[] := array_fill('stored'::text, ARRAY[cardinality(p_requests)]);
  v_decisions text[] := p_decisions;
BEGIN
  IF cardinality(array_remove(p_keys, NULL)) > 0 THEN
    -- Within one call the first item of a key takes it. A row that has not expired is locked too, so that it cannot be
    -- swept before it is read below.
    WITH kept AS (
      INSERT INTO rt_keys AS k (key, task, decision, expires_at)
        SELECT DISTINCT ON (u.key) u.key, u.task, u.decision::json, t + p_key_ms * interval '1 ms'
        FROM unnest(p_keys, p_tasks, p_decisions) WITH ORDINALITY u(key, task, decision, i)
        WHERE u.key IS NOT NULL
        ORDER BY u.key, u.i
        ON CONFLICT (key)
          DO UPDATE SET task = excluded.task, decision = excluded.decision, expires_at = excluded.expires_at
            WHERE k.expires_at <= t
        RETURNING k.key)
    SELECT coalesce(array_agg(x.key), '{}') INTO v_mine FROM kept x;
    -- A separate statement, so that it sees what others have committed meanwhile.
    SELECT array_agg(
             CASE WHEN u.key IS NULL OR u.nth = 1 AND u.key = ANY (v_mine) THEN 'stored'
                  WHEN k.task = u.task THEN 'replay'
                  ELSE 'violation' END ORDER BY u.i),
           array_agg(CASE WHEN u.key IS NULL THEN u.decision ELSE k.decision::text END ORDER BY u.i)
      INTO v_verdicts, v_decisions
      FROM (SELECT r.*, row_number() OVER (PARTITION BY r.key ORDER BY r.i) AS nth
            FROM unnest(p_keys, p_tasks, p_decisions) WITH ORDINALITY r(key, task, decision, i)) u
      LEFT JOIN rt_keys k ON k.key = u.key;
  END IF;
  -- A retry's id returns what the retry was answered with. Of two items with one id the later one is kept.
  INSERT INTO rt_decisions AS d (request, tenant, decision, trace_id, decided_at, expires_at)
    SELECT DISTINCT ON (u.request, u.tenant) u.request, u.tenant, u.decision::json, u.trace, t,
      t + p_decision_ms * interval '1 ms'
    FROM unnest(p_requests, p_tenants, p_traces, v_verdicts, v_decisions)
      WITH ORDINALITY u(request, tenant, trace, verdict, decision, i)
    WHERE u.verdict <> 'violation'
    ORDER BY u.request, u.tenant, u.i DESC
    ON CONFLICT (request, tenant) DO UPDATE
      SET decision = excluded.decision, trace_id = excluded.trace_id, decided_at = excluded.decided_at,
        expires_at = excluded.expires_at;
  RETURN QUERY SELECT u.verdict, CASE WHEN u.verdict = 'replay' THEN u.decision::json END
    FROM unnest(v_verdicts, v_decisions) WITH ORDINALITY u(verdict, decision, i) ORDER BY u.i;
END $$;
