-- The ledger: events, appended in the transaction of what they record, each with the hash of the one before it.
--
-- ledger_head is one row, locked from the append to the commit. That makes the numbers gapless and the chain one chain,
-- and it is why appending is the last lock that a transaction takes. A row's hash is the SHA-256 of the row without its
-- hash in RFC 8785 form (ledger_form_before, prev_hash, ledger_form_behind): members sorted, no spaces; to_json quotes
-- texts exactly as ECMAScript does. Payloads arrive in that form (src/ledger/canonical.ts) and are stored as they came:
-- json would keep the text too, but would not say so.

CREATE OR REPLACE FUNCTION ledger_refuse() RETURNS trigger
  LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'the ledger is append-only: % is refused', TG_OP USING ERRCODE = '42501';
END $$;

DO $do$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = 'ledger'::regclass AND g.tgname = 'ledger_append_only') THEN
    CREATE TRIGGER ledger_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger
      FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse();
  END IF;
END $do$;

-- A time as it is reported and hashed. A time that RFC 3339 in milliseconds cannot express, in a row that was tampered
-- with, is written as PostgreSQL prints it: two times never have one text, or a change from one to the other would go
-- unseen.
CREATE OR REPLACE FUNCTION ledger_time(p_at timestamptz) RETURNS text
  LANGUAGE sql STABLE AS $$
  SELECT CASE WHEN p_at = date_trunc('milliseconds', p_at) AND p_at >= '0001-01-01 00:00:00Z'
    AND p_at < '10000-01-01 00:00:00Z'
    THEN to_char(p_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') ELSE p_at::text END
$$;

-- The form around the hash of the row before.
CREATE OR REPLACE FUNCTION ledger_form_before(p_time text, p_actor text, p_payload text) RETURNS text
  LANGUAGE sql STABLE AS $$
  SELECT '{"actor":' || to_json(p_actor)::text || ',"at":"' || p_time || '","payload":' || p_payload || ',"prev_hash":"'
$$;

CREATE OR REPLACE FUNCTION ledger_form_behind(p_seq bigint, p_type text, p_trace_id text) RETURNS text
  LANGUAGE sql STABLE AS $$
  SELECT '","seq":' || p_seq || ',"trace_id":' || to_json(p_trace_id)::text || ',"type":' || to_json(p_type)::text
    || '}'
$$;

-- Answers the last number. The caller takes no further lock behind it.
CREATE OR REPLACE FUNCTION ledger_append(
  p_types text[], p_actors text[], p_traces text[], p_payloads text[]
) RETURNS bigint
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_seq bigint; v_hash text; t timestamptz; v_time text;
  v_before text[]; v_behind text[];
  v_prevs text[]; v_hashes text[];
  v_n int := coalesce(cardinality(p_types), 0);
BEGIN
  SELECT h.seq, h.hash INTO STRICT v_seq, v_hash FROM ledger_head h FOR UPDATE;
  -- Under the lock: times stand in the order of the numbers.
  t := date_trunc('milliseconds', clock());
  v_time := ledger_time(t);
  -- The form of each row around the hash of the one before it; the loop has only that left to do.
  SELECT array_agg(ledger_form_before(v_time, u.actor, u.payload)),
    array_agg(ledger_form_behind(v_seq + u.i, u.type, u.trace))
    INTO v_before, v_behind
      FROM unnest(p_types, p_actors, p_traces, p_payloads) WITH ORDINALITY u(type, actor, trace, payload, i);
  FOR i IN 1 .. v_n LOOP
    v_prevs[i] := v_hash;
    v_hash := encode(sha256(convert_to(v_before[i] || v_hash || v_behind[i], 'UTF8')), 'hex');
    v_hashes[i] := v_hash;
  END LOOP;
  INSERT INTO ledger (seq, at, type, actor, trace_id, payload, prev_hash, hash)
    SELECT v_seq + u.i, t, u.type, u.actor, u.trace, u.payload, u.prev, u.hash
    FROM unnest(p_types, p_actors, p_traces, p_payloads, v_prevs, v_hashes) WITH ORDINALITY u(type, actor, trace,
        payload, prev, hash, i);
  UPDATE ledger_head h SET seq = v_seq + v_n, hash = v_hash;
  RETURN v_seq + v_n;
END $$;

-- Looks at the p_rows rows behind p_after, whose hash is p_prev: how many there are, the last of them, and the first
-- that is not what it has to be, or is not there. What cannot be decided (a NULL where none may be) is not what it has
-- to be.
CREATE OR REPLACE FUNCTION ledger_check(
  p_after bigint, p_prev text, p_rows int
) RETURNS TABLE (seen bigint, last_seq bigint, last_hash text, broken_at bigint)
  LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT count(*), max(y.seq), (array_agg(y.hash ORDER BY y.seq DESC))[1],
    min(least(y.seq, y.due)) FILTER (WHERE y.ok IS NOT TRUE)
  FROM (
    SELECT x.seq, x.hash, lag(x.seq, 1, p_after) OVER w + 1 AS due,
      x.seq = lag(x.seq, 1, p_after) OVER w + 1 AND x.prev_hash = lag(x.hash, 1, p_prev) OVER w
        AND x.hash = encode(sha256(convert_to(ledger_form_before(ledger_time(x.at), x.actor, x.payload)
                || x.prev_hash || ledger_form_behind(x.seq, x.type, x.trace_id), 'UTF8')), 'hex') AS ok
    FROM (SELECT l.* FROM ledger l WHERE l.seq > p_after ORDER BY l.seq LIMIT p_rows) x
    WINDOW w AS (ORDER BY x.seq)
  ) y
$$;
