-- Moves a petition to another state, and releases its capacity slot when it leaves RECEIVED.

-- Moves a petition on. 'done', 'unknown', 'illegal' (its state does not allow it) or 'foreign' (p_submitter is given,
-- and it is another's). The row is as it is afterwards.
CREATE OR REPLACE FUNCTION petition_transition(
  p_id uuid, p_to text, p_fate text, p_reason text, p_event text, p_actor text, p_trace text, p_submitter text
) RETURNS TABLE (outcome text, petition petitions)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v petitions; v_from text; t timestamptz;
BEGIN
  SELECT x.* INTO v FROM petitions x WHERE x.id = p_id FOR UPDATE;
  IF NOT FOUND THEN
    outcome := 'unknown';
  ELSIF p_submitter IS NOT NULL AND v.submitter <> p_submitter THEN
    outcome := 'foreign';
  ELSIF (v.state, p_to) NOT IN (('RECEIVED', 'DELIBERATING'), ('RECEIVED', 'ACKNOWLEDGED'), ('RECEIVED', 'ESCALATED'),
      ('DELIBERATING', 'ACKNOWLEDGED'), ('DELIBERATING', 'REFERRED'), ('DELIBERATING', 'ESCALATED'),
        ('DELIBERATING', 'DEFERRED'), ('DELIBERATING', 'NO_RESPONSE'))
      OR (p_submitter IS NOT NULL AND v.state <> 'RECEIVED') THEN
    outcome := 'illegal';
  ELSE
    outcome := 'done';
    v_from := v.state;
    IF v.state = 'RECEIVED' THEN PERFORM gates_release(ARRAY['petitions'], ARRAY[1::bigint]); END IF;
    PERFORM FROM petition_states s WHERE s.state IN (v.state, p_to) ORDER BY s.state FOR UPDATE;
    UPDATE petition_states s SET n = s.n + CASE WHEN s.state = p_to THEN 1 ELSE -1 END WHERE s.state IN (v.state, p_to);
    t := date_trunc('milliseconds', clock());
    UPDATE petitions x
      SET state = p_to, came_from = x.state, fate_reason = p_fate, version = x.version + 1,
        updated_at = greatest(t, x.updated_at)
      WHERE x.id = p_id RETURNING x.* INTO v;
    PERFORM ledger_append(ARRAY[p_event], ARRAY[p_actor], ARRAY[p_trace], ARRAY[
      '{"from":"' || v_from || '","petition_id":"' || p_id || '","reason":'
        || coalesce(to_json(p_reason)::text, 'null') || ',"to":"' || p_to || '"}']);
    PERFORM pg_notify('spillway_' || current_schema(), 'petition:' || p_id);
  END IF;
  petition := v;
  RETURN NEXT;
END $$;
