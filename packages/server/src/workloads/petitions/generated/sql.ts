/** Made from the .sql files by scripts/generate-sql.mjs; not meant to be edited. */
export const petitionsSql = {
  name: 'petitions',
  tables: [
    {
      id: '0001-petitions',
      sql: `-- Petitions.
--
--   RECEIVED ──► DELIBERATING ──► ACKNOWLEDGED │ REFERRED │ ESCALATED │ DEFERRED │ NO_RESPONSE   (final)
--      └──────────────────────► ACKNOWLEDGED │ ESCALATED
--      └── withdrawn by its submitter ──► ACKNOWLEDGED, reason WITHDRAWN
--
-- A row remembers the state it came from, so that the legal moves are a CHECK and not only code. petition_states
-- counts by state in the same transactions: a list's total and the gauges cost one row each.
--
-- Lock order: petitions, gates, (accepting: lanes), petition_states (by state), ledger head. Accepting only inserts
-- petitions, so it never waits for one. A transaction that touches petition_blocks or the count of RECEIVED holds the
-- gate, so the order of the rest does not matter.

CREATE TABLE petitions (
  id           uuid PRIMARY KEY,
  type         text NOT NULL CHECK (type IN ('GENERAL', 'CESSATION', 'GRIEVANCE', 'COLLABORATION', 'META')),
  state        text NOT NULL,
  came_from    text,
  text         text NOT NULL CHECK (char_length(text) BETWEEN 1 AND 10000),
  content_hash text NOT NULL CHECK (octet_length(content_hash) = 64),
  realm        text CHECK (char_length(realm) BETWEEN 1 AND 100),
  submitter    text NOT NULL,                -- subject, submitter_id, or address: and the client's address
  fate_reason  text,
  version      int NOT NULL DEFAULT 1,
  created_at   timestamptz NOT NULL,
  updated_at   timestamptz NOT NULL,
  CONSTRAINT petitions_moves CHECK (CASE WHEN came_from IS NULL THEN state = 'RECEIVED' ELSE (came_from, state) IN (
    ('RECEIVED', 'DELIBERATING'), ('RECEIVED', 'ACKNOWLEDGED'), ('RECEIVED', 'ESCALATED'),
    ('DELIBERATING', 'ACKNOWLEDGED'), ('DELIBERATING', 'REFERRED'), ('DELIBERATING', 'ESCALATED'),
      ('DELIBERATING', 'DEFERRED'), ('DELIBERATING', 'NO_RESPONSE')) END)
);
CREATE INDEX petitions_by_state ON petitions (state, id);

CREATE TABLE petition_states (
  state text PRIMARY KEY,
  n     bigint NOT NULL DEFAULT 0 CHECK (n >= 0)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
INSERT INTO petition_states (state)
  VALUES ('RECEIVED'), ('DELIBERATING'), ('ACKNOWLEDGED'), ('REFERRED'), ('ESCALATED'), ('DEFERRED'), ('NO_RESPONSE');

-- Blocks of a submitter since the last one that was witnessed.
CREATE TABLE petition_blocks (
  submitter text PRIMARY KEY,
  minute    bigint NOT NULL,                 -- epoch minute of the last event
  pending   bigint NOT NULL CHECK (pending >= 0)
) WITH (fillfactor = 50);
CREATE INDEX petition_blocks_pending ON petition_blocks (minute) WHERE pending > 0;
CREATE INDEX petition_blocks_told ON petition_blocks (minute) WHERE pending = 0;

-- Few among many: each instance follows them, to log them.
CREATE INDEX ledger_overflows ON ledger (seq)
  WHERE type IN ('petition.queue.overflow.started', 'petition.queue.overflow.ended');
`,
    },
  ],
  functions: [
    {
      name: 'audit',
      sql: `-- Checks what must hold between transactions. Returns no row if all of it does.

-- What does not hold, for tests and for doctors.
CREATE OR REPLACE FUNCTION petitions_audit() RETURNS TABLE (fault text)
  LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT 'petitions in ' || s.state || ': ' || s.n || ' counted, ' || c.n || ' there' FROM petition_states s,
    LATERAL (SELECT count(*) AS n FROM petitions p WHERE p.state = s.state) c WHERE s.n <> c.n
  UNION ALL
  SELECT 'the gate holds ' || g.held || ' places, for ' || s.n || ' received and ' || o.n || ' queued'
    FROM gates g, petition_states s,
    LATERAL (SELECT count(*) AS n FROM ops x WHERE x.gate = 'petitions') o
    WHERE g.name = 'petitions' AND s.state = 'RECEIVED' AND g.held <> s.n + o.n
  UNION ALL
  SELECT 'petition ' || p.id || ' has no event of its receipt' FROM petitions p
    WHERE p.id NOT IN (SELECT (l.payload::json->>'petition_id')::uuid FROM ledger l
        WHERE l.type = 'petition.submission.received')
$$;
`,
    },
    {
      name: 'blocks',
      sql: `-- Rate limit events: one per submitter and minute. The first block is recorded at once, the others with the next
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
`,
    },
    {
      name: 'overflow',
      sql: `-- Records overflow in the ledger, in the commit that causes it: a submission, a transition or a new threshold. A
-- deferred trigger, because the ledger's lock comes last.

-- Appends the event at the end of the transaction.
CREATE OR REPLACE FUNCTION petition_overflow() RETURNS trigger
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  PERFORM ledger_append(ARRAY['petition.queue.overflow.' || CASE WHEN NEW.overflowing THEN 'started'
        ELSE 'ended' END], ARRAY['system'], ARRAY[''],
    ARRAY['{"depth":' || NEW.held || ',"resume_below":' || NEW.resume_below || ',"threshold":' || NEW.full_at || '}']);
  PERFORM pg_notify('spillway_' || current_schema(), 'petition_overflow:');
  RETURN NULL;
END $$;

DO $do$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = 'gates'::regclass AND g.tgname = 'petition_overflow') THEN
    CREATE CONSTRAINT TRIGGER petition_overflow AFTER UPDATE OF overflowing ON gates
      DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
      WHEN (NEW.name = 'petitions' AND OLD.overflowing IS DISTINCT FROM NEW.overflowing)
      EXECUTE FUNCTION petition_overflow();
  END IF;
END $do$;

-- The overflows that were witnessed behind p_after, oldest first; p_after NULL: since this process was enlisted,
-- which is before it registers the gate, and so may end an overflow itself.
CREATE OR REPLACE FUNCTION petition_overflows(
  p_worker uuid, p_after bigint, p_rows int,
  OUT after bigint, OUT overflows json
)
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  after := coalesce(p_after, (SELECT max(l.seq) FROM ledger l
        WHERE l.type IN ('petition.queue.overflow.started', 'petition.queue.overflow.ended')
    AND l.at < coalesce((SELECT date_trunc('milliseconds', w.started_at) FROM workers w
          WHERE w.id = p_worker), clock())), 0);
  SELECT coalesce(max(x.seq), after), json_agg(json_build_object('seq', x.seq, 'type', x.type, 'payload', x.payload)
      ORDER BY x.seq) INTO after, overflows FROM (
    SELECT l.seq, l.type, l.payload FROM ledger l
      WHERE l.type IN ('petition.queue.overflow.started', 'petition.queue.overflow.ended') AND l.seq > after
    ORDER BY l.seq LIMIT p_rows) x;
END $$;
`,
    },
    {
      name: 'submit',
      sql: `-- The effect of a flush of submissions: inserts the petitions and appends their events, in the accepting transaction.
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
`,
    },
    {
      name: 'transition',
      sql: `-- Moves a petition to another state, and releases its capacity slot when it leaves RECEIVED.

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
`,
    },
  ],
}
