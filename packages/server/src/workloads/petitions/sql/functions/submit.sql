-- The effect of a flush of submissions: inserts the petitions and appends their events, in the accepting transaction.
-- A petition in RECEIVED holds a capacity slot of the gate 'petitions'.

-- The effect of a flush (store/port.ts, StoreEffect). Returns the receipt of each petition that was received, and the
-- ledger position for those that a rate refused.
CREATE OR REPLACE FUNCTION petitions_submitted(
   p_verdicts text[], p_seqs bigint[], p_ids uuid[], p_types text[], p_texts text[], p_hashes text[],
  p_realms text[], p_submitters text[], p_traces text[], p_payloads text[]
) RETURNS json[]
  LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := date_trunc('milliseconds', clock());
  v_at text := to_char(t AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"');
  v_n int; v_limited boolean;
  v_actors text[]; v_traces text[]; v_payloads text[];
  v_receipts json[]; v_state json;
BEGIN
  -- No ORDER BY: a function scan gives its rows in order.
  SELECT count(*) FILTER (WHERE u.verdict = 'apply'), coalesce(bool_or(u.verdict = 'rate_limited'), false),
         array_agg('submitter:' || u.submitter) FILTER (WHERE u.verdict = 'apply'),
         array_agg(u.trace) FILTER (WHERE u.verdict = 'apply'), array_agg(u.payload) FILTER (WHERE u.verdict = 'apply'),
         array_agg(CASE WHEN u.verdict = 'apply' THEN ('{"petition_id":"' || u.id || '","state":"RECEIVED","type":"'
               || u.type || '","content_hash":"' || u.hash
           || '","realm":' || coalesce(to_json(u.realm)::text, 'null') || ',"created_at":"' || v_at || '"}')::json END)
    INTO v_n, v_limited, v_actors, v_traces, v_payloads, v_receipts
    FROM unnest(p_verdicts, p_ids, p_types, p_hashes, p_realms, p_submitters, p_traces, p_payloads) u(verdict, id,
        type, hash, realm, submitter, trace, payload);
  IF v_n > 0 THEN
    INSERT INTO petitions (id, type, state, text, content_hash, realm, submitter, created_at, updated_at)
      SELECT u.id, u.type, 'RECEIVED', u.text, u.hash, u.realm, u.submitter, t, t
      FROM unnest(p_verdicts, p_ids, p_types, p_texts, p_hashes, p_realms, p_submitters) u(verdict, id, type, text,
          hash, realm, submitter)
      WHERE u.verdict = 'apply';
    UPDATE petition_states s SET n = s.n + v_n WHERE s.state = 'RECEIVED';
    PERFORM ledger_append(array_fill('petition.submission.received'::text, ARRAY[v_n]), v_actors, v_traces, v_payloads);
  END IF;
  IF v_limited THEN
    v_state := petitions_blocked(p_verdicts, p_submitters, p_traces);
    SELECT array_agg(CASE WHEN u.verdict = 'rate_limited' THEN v_state ELSE u.receipt END) INTO v_receipts
      FROM unnest(p_verdicts, v_receipts) u(verdict, receipt);
  END IF;
  RETURN v_receipts;
END $$;
