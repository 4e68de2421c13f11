-- Idempotency keys: the first request of a key takes it, later ones get its answer.
--
-- idempotency_take, idempotency_release and idempotency_answer are steps of accept and run with its settings.

-- Takes the keys, in key order. verdicts is NULL if all of them are new. A key that is there already says what to
-- answer.
CREATE OR REPLACE FUNCTION idempotency_take(
  p_keys uuid[], p_requests uuid[], p_ops uuid[], p_batch int[], p_at timestamptz, p_ttl_ms bigint,
  OUT verdicts text[], OUT answers json[], OUT ops uuid[]
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_seen int[]; v_wrong text[]; r record;
BEGIN
  WITH k AS (
    SELECT u.key, u.request, u.i FROM unnest(p_keys, p_requests) WITH ORDINALITY u(key, request, i)
    WHERE u.key IS NOT NULL ORDER BY u.key
  ), made AS (
    INSERT INTO idempotency AS d (key, request, op, expires_at)
    SELECT k.key, k.request, p_ops[k.i], p_at + p_ttl_ms * interval '1 ms' FROM k
    ON CONFLICT (key) DO UPDATE
      SET request = excluded.request, op = excluded.op, answer = NULL, expires_at = excluded.expires_at
      WHERE d.expires_at <= p_at
    RETURNING d.key
  )
  SELECT array_agg(k.i::int) INTO v_seen FROM k WHERE k.key NOT IN (SELECT made.key FROM made);
  IF v_seen IS NULL THEN RETURN; END IF;
  verdicts := array_fill(NULL::text, ARRAY[cardinality(p_keys)]);
  answers := array_fill(NULL::json, ARRAY[cardinality(p_keys)]);
  ops := array_fill(NULL::uuid, ARRAY[cardinality(p_keys)]);
  FOR r IN SELECT s.i, d.request = p_requests[s.i] AS is_same, d.answer, d.op
      FROM unnest(v_seen) s(i) LEFT JOIN idempotency d ON d.key = p_keys[s.i] LOOP
    verdicts[r.i] := CASE WHEN r.is_same IS NOT TRUE THEN 'mismatch' WHEN r.answer IS NULL THEN 'in_progress'
      ELSE 'replay' END;
    answers[r.i] := r.answer;
    ops[r.i] := r.op;
  END LOOP;
  -- A batch is one request with one answer: what is wrong with one of its keys is wrong with all of it.
  IF cardinality(p_batch) > 0 AND verdicts && '{mismatch,in_progress}' THEN
    SELECT array_agg(coalesce(b.verdict, u.verdict) ORDER BY u.i) INTO v_wrong
      FROM unnest(p_batch, verdicts) WITH ORDINALITY u(batch, verdict, i)
      LEFT JOIN (
        SELECT x.batch, CASE WHEN bool_or(x.verdict = 'in_progress') THEN 'in_progress' ELSE 'mismatch' END AS verdict
        FROM unnest(p_batch, verdicts) x(batch, verdict) WHERE x.verdict IN ('mismatch', 'in_progress') GROUP BY x.batch
      ) b ON b.batch = u.batch;
    DELETE FROM idempotency d USING unnest(p_keys, p_ops, verdicts, v_wrong) u(key, op, verdict, wrong)
      WHERE u.verdict IS NULL AND u.wrong IS NOT NULL AND d.key = u.key AND d.op = u.op;
    verdicts := v_wrong;
  END IF;
END $$;

-- A refused item gives its key back.
CREATE OR REPLACE FUNCTION idempotency_release(p_keys uuid[], p_verdicts text[]) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  DELETE FROM idempotency d USING unnest(p_keys, p_verdicts) u(key, verdict)
    WHERE d.key = u.key AND u.verdict IN ('capacity_full', 'rate_limited', 'halted', 'depth_full');
END $$;

-- What is queued, or answers with a ticket, stores that answer with its key.
CREATE OR REPLACE FUNCTION idempotency_answer(
  p_keys uuid[], p_verdicts text[], p_places bigint[], p_waits_ms bigint[], p_reasons text[]
) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE idempotency d
    SET answer = json_build_object('v', 'queue', 'place', u.place, 'wait_ms', u.wait_ms, 'reason', u.reason)
    FROM unnest(p_keys, p_verdicts, p_places, p_waits_ms, p_reasons) u(key, verdict, place, wait_ms, reason)
    WHERE (u.verdict = 'queue' OR u.verdict = 'execute' AND u.reason IN ('requested', 'still_running'))
      AND d.key = u.key;
END $$;

-- What the effect of the applied items returned is the answer for their keys.
CREATE OR REPLACE FUNCTION keys_applied(
  p_keys uuid[], p_ids uuid[], p_verdicts text[], p_results json[]
) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  IF cardinality(p_results) IS DISTINCT FROM cardinality(p_verdicts) THEN
    RAISE EXCEPTION 'the effect returned % results for % items', coalesce(cardinality(p_results), 0),
      cardinality(p_verdicts) USING ERRCODE = 'P0001';
  END IF;
  IF cardinality(p_keys) = 0 THEN RETURN; END IF;
  UPDATE idempotency d SET answer = json_build_object('v', 'done', 'result', u.result)
    FROM unnest(p_keys, p_ids, p_verdicts, p_results) u(key, op, verdict, result)
    WHERE u.verdict = 'apply' AND d.key = u.key AND d.op = u.op;
END $$;

-- A step of settle. Only while the row is this operation's: an expired key may belong to a later request by now.
CREATE OR REPLACE FUNCTION idempotency_settle(r_lane uuid[], r_seq bigint[], r_key uuid[], r_answer text[]) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE idempotency d SET answer = u.answer::json
    FROM (
      SELECT x.key, x.answer, o.id FROM unnest(r_lane, r_seq, r_key, r_answer) x(lane, seq, key, answer)
      JOIN ops o ON o.lane = x.lane AND o.seq = x.seq WHERE x.key IS NOT NULL ORDER BY x.key OFFSET 0
    ) u
    WHERE d.key = u.key AND d.op = u.id AND d.answer IS NULL;
END $$;
