-- Stores decisions with their idempotency keys, one call per flush.

-- Per item 0: stored; 1: its key has a decision already, which is returned; 2: its key belongs to another task.
CREATE OR REPLACE FUNCTION rt_record(
  p_requests uuid[], p_tenants text[], p_traces text[], p_keys uuid[], p_tasks uuid[], p_decisions text[],
  p_decision_ms bigint, p_key_ms bigint
) RETURNS TABLE (outcome smallint, decision json)
  LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_mine uuid[];
  v_outcomes smallint[] := array_fill(0::smallint, ARRAY[cardinality(p_requests)]);
  v_decisions text[] := p_decisions;
BEGIN
  IF cardinality(array_remove(p_keys, NULL)) > 0 THEN
    -- Within one call the first of a key stands for it. A row that has not expired is locked all the same: it cannot
    -- be swept before it is read below.
    WITH kept AS (
      INSERT INTO rt_keys AS k (key, task, decision, expires_at)
        SELECT DISTINCT ON (u.key) u.key, u.task, u.decision::json, t + p_key_ms * interval '1 ms'
        FROM unnest(p_keys, p_tasks, p_decisions) WITH ORDINALITY u(key, task, decision, i) WHERE u.key IS NOT NULL
        ORDER BY u.key, u.i
        ON CONFLICT (key)
          DO UPDATE SET task = excluded.task, decision = excluded.decision, expires_at = excluded.expires_at
            WHERE k.expires_at <= t
        RETURNING k.key)
    SELECT coalesce(array_agg(x.key), '{}') INTO v_mine FROM kept x;
    -- A statement of its own, so that it sees what others have committed meanwhile.
    SELECT array_agg(CASE WHEN u.key IS NULL OR u.nth = 1 AND u.key = ANY (v_mine) THEN 0 WHEN k.task = u.task THEN 1
        ELSE 2 END ORDER BY u.i),
           array_agg(CASE WHEN u.key IS NULL THEN u.decision ELSE k.decision::text END ORDER BY u.i)
      INTO v_outcomes, v_decisions
      FROM (SELECT r.*, row_number() OVER (PARTITION BY r.key ORDER BY r.i) AS nth
            FROM unnest(p_keys, p_tasks, p_decisions) WITH ORDINALITY r(key, task, decision, i)) u
            LEFT JOIN rt_keys k ON k.key = u.key;
  END IF;
  -- Under the id of a retry stands what it was answered with; of two with one id, the later.
  INSERT INTO rt_decisions AS d (request, tenant, decision, trace_id, decided_at, expires_at)
    SELECT DISTINCT ON (u.request, u.tenant) u.request, u.tenant, u.decision::json, u.trace, t,
      t + p_decision_ms * interval '1 ms'
    FROM unnest(p_requests, p_tenants, p_traces, v_outcomes, v_decisions) WITH ORDINALITY u(request, tenant, trace,
        outcome, decision, i) WHERE u.outcome < 2
    ORDER BY u.request, u.tenant, u.i DESC
    ON CONFLICT (request, tenant) DO UPDATE
      SET decision = excluded.decision, trace_id = excluded.trace_id, decided_at = excluded.decided_at,
        expires_at = excluded.expires_at;
  RETURN QUERY SELECT u.outcome, CASE WHEN u.outcome = 1 THEN u.decision::json END
    FROM unnest(v_outcomes, v_decisions) WITH ORDINALITY u(outcome, decision, i) ORDER BY u.i;
END $$;

-- The effect of an admission (store/port.ts, StoreEffect): none. It is accepted for its gates alone.
CREATE OR REPLACE FUNCTION rt_admit(p_verdicts text[], p_seqs bigint[]) RETURNS json[]
  LANGUAGE sql STABLE AS $$
  SELECT array_agg(CASE WHEN u.verdict = 'apply' THEN '{}'::json END) FROM unnest(p_verdicts) u(verdict)
$$;
