-- Rate limit events: one per submitter and minute. The first block is recorded at once, the others with the next
-- minute's event. Every writer of petition_blocks holds the gate.

-- Two transactions cannot both find that there is no row yet: a transaction that refuses a petition holds the gate.
-- Returns what a refusal reports: the ledger's position and the cycle.
CREATE OR REPLACE FUNCTION petitions_blocked(p_verdicts text[], p_submitters text[], p_traces text[]) RETURNS json
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_minute bigint := floor(extract(epoch FROM t) / 60);
  v_who text[]; v_counts bigint[]; v_traces text[];
BEGIN
  WITH blocked AS (
    SELECT u.who, count(*) AS n, (array_agg(u.trace))[1] AS trace
      FROM unnest(p_verdicts, p_submitters, p_traces) u(verdict, who, trace)
    WHERE u.verdict = 'rate_limited' GROUP BY u.who
  ), known AS MATERIALIZED (
    SELECT x.submitter, x.minute, x.pending FROM petition_blocks x WHERE x.submitter IN (SELECT b.who FROM blocked b)
      FOR UPDATE
  ), noted AS (
    INSERT INTO petition_blocks AS x (submitter, minute, pending) SELECT b.who, v_minute, b.n - 1 FROM blocked b
      ON CONFLICT (submitter) DO UPDATE SET
        pending = CASE WHEN x.minute < v_minute THEN excluded.pending ELSE x.pending + excluded.pending + 1 END,
        minute = greatest(x.minute, v_minute)
  )
  SELECT array_agg(b.who), array_agg(coalesce(k.pending, 0) + 1), array_agg(b.trace) INTO v_who, v_counts, v_traces
    FROM blocked b LEFT JOIN known k ON k.submitter = b.who WHERE k.minute IS NULL OR k.minute < v_minute;
  RETURN json_build_object('as_of_seq', petitions_witness_blocks(v_who, v_counts, v_traces),
    'cycle_id', to_char(t AT TIME ZONE 'UTC', 'YYYY-"Q"Q'));
END $$;

CREATE OR REPLACE FUNCTION petitions_witness_blocks(p_who text[], p_counts bigint[], p_traces text[]) RETURNS bigint
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_actors text[]; v_payloads text[];
BEGIN
  IF p_who IS NULL THEN RETURN (SELECT h.seq FROM ledger_head h); END IF;
  SELECT array_agg('submitter:' || u.who),
    array_agg('{"count":' || u.n || ',"submitter_id":' || to_json(u.who)::text || '}') INTO v_actors, v_payloads
    FROM unnest(p_who, p_counts) u(who, n);
  RETURN ledger_append(array_fill('petition.rate_limit.blocked'::text, ARRAY[cardinality(p_who)]), v_actors,
      p_traces, v_payloads);
END $$;

-- Records the blocks of a past minute that no later block has recorded.
CREATE OR REPLACE FUNCTION petitions_record_blocks(p_rows int, OUT recorded int)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_minute bigint := floor(extract(epoch FROM clock()) / 60);
  v_who text[]; v_counts bigint[];
BEGIN
  PERFORM FROM gates g WHERE g.name = 'petitions' FOR UPDATE;
  SELECT array_agg(x.submitter), array_agg(x.pending) INTO v_who, v_counts FROM (
    SELECT b.submitter, b.pending FROM petition_blocks b WHERE b.pending > 0 AND b.minute < v_minute
      ORDER BY b.submitter LIMIT p_rows FOR UPDATE SKIP LOCKED) x;
  recorded := coalesce(cardinality(v_who), 0);
  IF recorded > 0 THEN
    UPDATE petition_blocks b SET pending = 0, minute = v_minute WHERE b.submitter = ANY (v_who);
    PERFORM petitions_witness_blocks(v_who, v_counts, array_fill(''::text, ARRAY[recorded]));
  END IF;
END $$;

-- Submitters that were not blocked for an hour.
CREATE OR REPLACE FUNCTION petitions_forget_blocks(p_rows int) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_minute bigint := floor(extract(epoch FROM clock()) / 60);
  v_n int;
BEGIN
  -- Not under the gate, for which petitions wait, while there is nothing to forget.
  IF NOT EXISTS (SELECT FROM petition_blocks b WHERE b.pending = 0 AND b.minute < v_minute - 60) THEN RETURN 0; END IF;
  PERFORM FROM gates g WHERE g.name = 'petitions' FOR UPDATE;
  DELETE FROM petition_blocks d
    WHERE d.ctid = ANY (ARRAY(SELECT b.ctid FROM petition_blocks b WHERE b.pending = 0 AND b.minute < v_minute - 60
          ORDER BY b.minute LIMIT p_rows FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS v_n = ROW_COUNT;
  RETURN v_n;
END $$;

-- The name that the release before (0.2.0) uses; to be removed after the next release.
CREATE OR REPLACE FUNCTION petitions_tell_blocks(p_rows int) RETURNS int
  LANGUAGE sql SET search_path FROM CURRENT AS $$ SELECT petitions_record_blocks(p_rows) $$;
