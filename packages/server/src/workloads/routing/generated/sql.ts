/** Made from the .sql files by scripts/generate-sql.mjs; not meant to be edited. */
export const routingSql = {
  name: 'routing',
  tables: [
    {
      id: '0001-routing',
      sql: `-- Routing: policies, blocks, and decisions.
--
-- rt_state is one row. A change of policies or blocks locks it first, so that the limits are exact and the numbers of
-- changes are in commit order: a process that has read all changes up to n misses none of them. Removed policies leave
-- no row; removals counts them, and the rest is found by comparing names.
--
-- A decision is written with its idempotency key in one transaction, after it was made and never before. Of several at
-- once with one key, the first to insert is kept; the others wait for its commit and find it.
--
-- Lock order: rt_state, policies or blocks. rt_keys (by key), rt_decisions (by request, tenant).

CREATE TABLE rt_state (
  one      boolean PRIMARY KEY DEFAULT true CHECK (one),
  change   bigint NOT NULL DEFAULT 0,        -- of policies: the last one
  removals bigint NOT NULL DEFAULT 0,        -- of policies
  policies int NOT NULL DEFAULT 0 CHECK (policies >= 0),
  blocks   int NOT NULL DEFAULT 0 CHECK (blocks >= 0)
) WITH (fillfactor = 50);
INSERT INTO rt_state DEFAULT VALUES;

CREATE TABLE rt_policies (
  tenant     text NOT NULL,                  -- empty: for every tenant
  id         text NOT NULL CHECK (id <> ''),
  body       json NOT NULL,
  version    int NOT NULL DEFAULT 1 CHECK (version > 0),
  change     bigint NOT NULL,
  updated_at timestamptz NOT NULL,
  PRIMARY KEY (tenant, id)
);
CREATE UNIQUE INDEX rt_policies_change ON rt_policies (change);

CREATE TABLE rt_blocks (
  type       text NOT NULL CHECK (type <> ''),
  version    text NOT NULL CHECK (version <> ''),
  body       json NOT NULL,
  created_at timestamptz NOT NULL,
  updated_at timestamptz NOT NULL,
  PRIMARY KEY (type, version)
);

CREATE TABLE rt_decisions (
  request    uuid NOT NULL,
  tenant     text NOT NULL,
  decision   json NOT NULL,
  trace_id   text NOT NULL,
  decided_at timestamptz NOT NULL,
  expires_at timestamptz NOT NULL,
  PRIMARY KEY (request, tenant)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);

-- Rows come and go in this order: inserts touch its last page only.
CREATE INDEX rt_decisions_expires ON rt_decisions (expires_at);

CREATE TABLE rt_keys (
  key        uuid PRIMARY KEY,               -- 128 bits of sha256(tenant, NUL, idempotency key), made by the caller
  task       uuid NOT NULL,                  -- of the task that it was used for, likewise
  decision   json NOT NULL,
  expires_at timestamptz NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);
CREATE INDEX rt_keys_expires ON rt_keys (expires_at);

CREATE TABLE rt_burials (
  ticket     uuid PRIMARY KEY,               -- of the operation whose message is among the broker's dead letters
  letter     text NOT NULL,
  error      text NOT NULL,
  is_read    boolean NOT NULL DEFAULT false, -- by an attempt of the ticket
  expires_at timestamptz NOT NULL
);
CREATE INDEX rt_burials_expires ON rt_burials (expires_at);
`,
    },
  ],
  functions: [
    {
      name: 'blocks',
      sql: `-- Creates, replaces and removes blocks.

-- 'created', 'replaced', 'exists' (and it may not be replaced), or 'full'.
CREATE OR REPLACE FUNCTION rt_block_put(
  p_type text, p_version text, p_body text, p_replace boolean, p_max int,
  OUT outcome text, OUT created_at timestamptz, OUT updated_at timestamptz
)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_count int;
  t timestamptz := date_trunc('milliseconds', clock());
BEGIN
  SELECT s.blocks INTO v_count FROM rt_state s FOR UPDATE;
  SELECT b.created_at INTO created_at FROM rt_blocks b WHERE b.type = p_type AND b.version = p_version;
  IF FOUND THEN
    outcome := CASE WHEN p_replace THEN 'replaced' ELSE 'exists' END;
    IF NOT p_replace THEN RETURN; END IF;
    UPDATE rt_blocks b SET body = p_body::json, updated_at = t WHERE b.type = p_type AND b.version = p_version;
  ELSE
    outcome := CASE WHEN v_count >= p_max THEN 'full' ELSE 'created' END;
    IF outcome = 'full' THEN RETURN; END IF;
    created_at := t;
    INSERT INTO rt_blocks (type, version, body, created_at, updated_at) VALUES (p_type, p_version, p_body::json, t, t);
    UPDATE rt_state s SET blocks = s.blocks + 1;
  END IF;
  updated_at := t;
END $$;

CREATE OR REPLACE FUNCTION rt_block_remove(p_type text, p_version text) RETURNS boolean
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  PERFORM FROM rt_state s FOR UPDATE;
  DELETE FROM rt_blocks b WHERE b.type = p_type AND b.version = p_version;
  IF NOT FOUND THEN RETURN false; END IF;
  UPDATE rt_state s SET blocks = s.blocks - 1;
  RETURN true;
END $$;
`,
    },
    {
      name: 'decisions',
      sql: `-- Stores decisions with their idempotency keys, one call per flush.
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
`,
    },
    {
      name: 'policies',
      sql: `-- Creates, replaces and removes policies, and notifies the other processes.

-- 'created', 'replaced', or 'full': there are as many as may be.
CREATE OR REPLACE FUNCTION rt_policy_put(
  p_tenant text, p_id text, p_body text, p_max int,
  OUT outcome text, OUT version int, OUT updated_at timestamptz
)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_change bigint; v_count int;
  t timestamptz := date_trunc('milliseconds', clock());
BEGIN
  SELECT s.change + 1, s.policies INTO v_change, v_count FROM rt_state s FOR UPDATE;
  UPDATE rt_policies p SET body = p_body::json, version = p.version + 1, change = v_change, updated_at = t
    WHERE p.tenant = p_tenant AND p.id = p_id RETURNING p.version INTO version;
  outcome := 'replaced';
  IF version IS NULL THEN
    outcome := CASE WHEN v_count >= p_max THEN 'full' ELSE 'created' END;
    IF outcome = 'full' THEN RETURN; END IF;
    INSERT INTO rt_policies (tenant, id, body, change, updated_at) VALUES (p_tenant, p_id, p_body::json, v_change, t);
    version := 1;
  END IF;
  UPDATE rt_state s SET change = v_change, policies = s.policies + CASE WHEN outcome = 'created' THEN 1 ELSE 0 END;
  updated_at := t;
  PERFORM pg_notify('spillway_' || current_schema(), 'rtpol:' || v_change);
END $$;

CREATE OR REPLACE FUNCTION rt_policy_remove(p_tenant text, p_id text) RETURNS boolean
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_change bigint;
BEGIN
  SELECT s.change + 1 INTO v_change FROM rt_state s FOR UPDATE;
  DELETE FROM rt_policies p WHERE p.tenant = p_tenant AND p.id = p_id;
  IF NOT FOUND THEN RETURN false; END IF;
  UPDATE rt_state s SET change = v_change, removals = s.removals + 1, policies = s.policies - 1;
  PERFORM pg_notify('spillway_' || current_schema(), 'rtpol:' || v_change);
  RETURN true;
END $$;
`,
    },
    {
      name: 'sweep',
      sql: `-- Removes expired rows: at most p_rows of each table. Null: another process is sweeping.
CREATE OR REPLACE FUNCTION rt_sweep(p_rows int, OUT decisions int, OUT keys int, OUT burials int)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  IF NOT pg_try_advisory_xact_lock(hashtext('spillway.rt_sweep'), hashtext(current_schema())) THEN RETURN; END IF;
  DELETE FROM rt_decisions d WHERE d.ctid = ANY (ARRAY(
    SELECT x.ctid FROM rt_decisions x WHERE x.expires_at <= t ORDER BY x.expires_at LIMIT p_rows
      FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS decisions = ROW_COUNT;
  DELETE FROM rt_keys d WHERE d.ctid = ANY (ARRAY(
    SELECT x.ctid FROM rt_keys x WHERE x.expires_at <= t ORDER BY x.expires_at LIMIT p_rows FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS keys = ROW_COUNT;
  DELETE FROM rt_burials d WHERE d.ctid = ANY (ARRAY(
    SELECT x.ctid FROM rt_burials x WHERE x.expires_at <= t ORDER BY x.expires_at LIMIT p_rows FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS burials = ROW_COUNT;
END $$;
`,
    },
  ],
}
