-- Stores the answers of idempotency keys whose operations were applied at once.

-- What the effect of those that were applied told is the answer for their keys.
CREATE OR REPLACE FUNCTION keys_applied(
  p_keys uuid[], p_ids uuid[], p_verdicts smallint[], p_told json[]
) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  IF cardinality(p_told) IS DISTINCT FROM cardinality(p_verdicts) THEN
    RAISE EXCEPTION 'the effect told of % items, not of %', coalesce(cardinality(p_told), 0), cardinality(p_verdicts)
      USING ERRCODE = 'P0001';
  END IF;
  IF cardinality(p_keys) = 0 THEN RETURN; END IF;
  UPDATE idempotency d SET answer = json_build_object('v', 'done', 'result', u.told)
    FROM unnest(p_keys, p_ids, p_verdicts, p_told) u(key, op, verdict, told)
    WHERE u.verdict = 2 AND d.key = u.key AND d.op = u.op;
END $$;
