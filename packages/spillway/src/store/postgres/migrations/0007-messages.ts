import { beginning, heads } from './message-groups.js'

/**
 * Messages: a log per partition, a cursor per partition and consumer group.
 *
 *   push ──► mq_messages (partition, seq) ──► for each group: idle ──push──► ready ──pop──► leased ──all answered──► idle or ready
 *                                                                              ▲              │
 *                                                                              └── expired ◄──┘  (every delivery counts)
 *
 * A partition is a lane (the same 128 bits), so what is pushed at once and what was queued come in one order; its messages
 * have a number of their own, given under the partition's row. The numbers have no gaps and are given in commit order: a
 * cursor that has passed a number can never have missed a smaller one.
 *
 * Invariant: a group that has something to read in a partition (head < tail) has exactly one of a row in mq_ready and a
 * lease. Push adds the row where the group was idle; whoever ends a lease adds it where there is more, and looks at the tail
 * under a share lock of the partition before it says that there is not. Where a group has no cursor: see message-groups.ts.
 *
 * Of a lease's messages \`batch\` are those delivered, \`open\` those not answered yet, \`done\` all beyond head that are
 * settled. Head moves when the last one is answered: to before the first that is to be delivered again. \`tries\` counts the
 * deliveries that failed. A batch that expired is delivered one by one up to \`careful\`: what fails alone is at fault alone.
 *
 * Locks: lanes → mq_partitions (by id) → mq_messages; mq_cursors (by partition, group) → mq_partitions → mq_messages → mq_leases
 * (by id, last of all).
 * Push never locks cursors, and pop takes no lock that it would have to wait for.
 */
export const messages = {
  version: 7,
  name: 'messages',
  sql: `
CREATE TABLE mq_queues (
  id                  int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name                text NOT NULL UNIQUE,
  namespace           text,
  task                text,
  lease_seconds       int NOT NULL DEFAULT 300 CHECK (lease_seconds > 0),
  retry_limit         int NOT NULL DEFAULT 3 CHECK (retry_limit >= 0),
  retry_delay_ms      int NOT NULL DEFAULT 1000 CHECK (retry_delay_ms >= 0),
  max_size            bigint NOT NULL DEFAULT 0 CHECK (max_size >= 0),           -- 0: no limit
  priority            int NOT NULL DEFAULT 0,                                    -- higher first, among queues that a pop names together
  delay_seconds       int NOT NULL DEFAULT 0 CHECK (delay_seconds >= 0),
  window_seconds      int NOT NULL DEFAULT 0 CHECK (window_seconds >= 0),
  retention_seconds   int NOT NULL DEFAULT 0 CHECK (retention_seconds >= 0),     -- 0: for ever
  completed_retention_seconds int NOT NULL DEFAULT 0 CHECK (completed_retention_seconds >= 0),
  retention_enabled   boolean NOT NULL DEFAULT false,
  max_wait_seconds    int NOT NULL DEFAULT 0 CHECK (max_wait_seconds >= 0),      -- 0: for ever
  dead_letter_queue   boolean NOT NULL DEFAULT false,
  dlq_after_max_retries boolean NOT NULL DEFAULT false,
  encryption_enabled  boolean NOT NULL DEFAULT false,
  size_most           bigint,                                                    -- it holds no more than this; NULL: nobody knows. Counting costs a look at each partition
  created_at          timestamptz NOT NULL
);
CREATE INDEX mq_queues_namespace ON mq_queues (namespace, task);

CREATE TABLE mq_groups (
  id         int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  queue      int NOT NULL REFERENCES mq_queues ON DELETE CASCADE,
  name       text NOT NULL,
  mode       text NOT NULL,                  -- how it began: all, new, or from a time
  since      timestamptz NOT NULL,           -- what it begins behind, unless it began with all
  reached    uuid,                           -- joined: the partitions up to this one; NULL: all
  starts     timestamptz,                    -- the others begin with what came from this time on; NULL: with all
  created_at timestamptz NOT NULL,
  UNIQUE (queue, name)
);

CREATE TABLE mq_partitions (
  id         uuid PRIMARY KEY,               -- the lane's
  queue      int NOT NULL REFERENCES mq_queues ON DELETE CASCADE,
  name       text NOT NULL,
  tail       bigint NOT NULL,                -- the last message
  low        bigint NOT NULL DEFAULT 0,      -- the last one that is deleted, with all before it
  holes      bigint[] NOT NULL DEFAULT '{}', -- deleted singly, behind that: they take no room
  mark       bigint NOT NULL DEFAULT 0,      -- consumed by all groups at marked_at: deleted when that is long enough ago
  marked_at  timestamptz,
  pushed_at  timestamptz NOT NULL,
  created_at timestamptz NOT NULL,
  CHECK (low <= tail)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
CREATE INDEX mq_partitions_queue ON mq_partitions (queue, name);
CREATE INDEX mq_partitions_in_turn ON mq_partitions (queue, id);

CREATE TABLE mq_messages (
  partition      uuid NOT NULL,
  seq            bigint NOT NULL,
  id             uuid NOT NULL,
  transaction_id text NOT NULL,
  trace_id       text,
  grp            int,                        -- replayed for this group alone
  sealed         boolean NOT NULL,           -- payload is AES-256-GCM, as base64
  payload        text NOT NULL,              -- JSON as it came; json would read it once more
  created_at     timestamptz NOT NULL,
  PRIMARY KEY (partition, seq)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_vacuum_cost_delay = 0);
CREATE UNIQUE INDEX mq_messages_once ON mq_messages (partition, transaction_id) WHERE grp IS NULL;
CREATE INDEX mq_messages_replayed ON mq_messages (partition, transaction_id) WHERE grp IS NOT NULL;

-- No foreign keys from here on: checking them would lock rows of the groups, which those who end groups lock first.
CREATE TABLE mq_cursors (
  partition  uuid NOT NULL,
  grp        int NOT NULL,
  head       bigint NOT NULL,                -- everything up to here is settled
  done       bigint[] NOT NULL DEFAULT '{}',
  lease      uuid,
  batch      bigint[] NOT NULL DEFAULT '{}',
  open       bigint[] NOT NULL DEFAULT '{}',
  tries      jsonb NOT NULL DEFAULT '{}',    -- by number
  careful    bigint NOT NULL DEFAULT 0,
  not_before timestamptz,
  consumed   bigint NOT NULL DEFAULT 0,
  moved_at   timestamptz,
  PRIMARY KEY (partition, grp),
  CHECK (cardinality(open) = 0 OR lease IS NOT NULL)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
CREATE INDEX mq_cursors_grp ON mq_cursors (grp);

CREATE TABLE mq_ready (
  partition uuid NOT NULL,
  grp       int NOT NULL,
  at        timestamptz NOT NULL,
  head      bigint,                          -- where the group begins, while it has no cursor
  PRIMARY KEY (partition, grp)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX mq_ready_order ON mq_ready (grp, at);

CREATE TABLE mq_leases (
  id         uuid PRIMARY KEY,
  grp        int NOT NULL,
  until      timestamptz NOT NULL,
  partitions uuid[] NOT NULL                 -- those that are still leased
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX mq_leases_due ON mq_leases (grp, until);

-- What a group gave up, whole: it outlives the log.
CREATE TABLE mq_dead (
  id             uuid PRIMARY KEY DEFAULT gen_random_uuid(),
  message_id     uuid NOT NULL,
  partition      uuid NOT NULL,
  seq            bigint NOT NULL,
  queue          text NOT NULL,
  partition_name text NOT NULL,
  namespace      text,
  task           text,
  grp            text NOT NULL,
  transaction_id text NOT NULL,
  trace_id       text,
  sealed         boolean NOT NULL,
  payload        text NOT NULL,
  error          text,
  retry_count    int NOT NULL,
  is_letter      boolean NOT NULL,           -- false: the queue has no dead letters, this is the record that it was skipped
  created_at     timestamptz NOT NULL,
  moved_at       timestamptz NOT NULL
);
CREATE INDEX mq_dead_queue ON mq_dead (queue, moved_at DESC);
CREATE INDEX mq_dead_message ON mq_dead (partition, transaction_id);

CREATE TABLE mq_traces (
  id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  partition      uuid NOT NULL,
  transaction_id text NOT NULL,
  grp            text,
  event          text NOT NULL,
  names          text[] NOT NULL,
  data           text NOT NULL,
  worker         text,
  created_at     timestamptz NOT NULL
);
CREATE INDEX mq_traces_message ON mq_traces (partition, transaction_id);

-- Whoever makes or ends a group of a queue, or deletes the queue, waits for those who push to it, and they for it: no push can
-- miss a group. False: one of the queues went before it was guarded.
CREATE FUNCTION mq_guard(p_queues int[], p_exclusive boolean) RETURNS boolean LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  v_queue int; v_there boolean := true;
BEGIN
  FOR v_queue IN SELECT DISTINCT q FROM unnest(p_queues) q ORDER BY q LOOP
    IF p_exclusive THEN PERFORM pg_advisory_xact_lock(hashtext('spillway.groups.' || current_schema()), v_queue);
    ELSE PERFORM pg_advisory_xact_lock_shared(hashtext('spillway.groups.' || current_schema()), v_queue); END IF;
    v_there := v_there AND EXISTS (SELECT FROM mq_queues q WHERE q.id = v_queue);
  END LOOP;
  RETURN v_there;
END $$;

CREATE FUNCTION mq_queue(p_name text) RETURNS int LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_id int;
BEGIN
  -- Another may make it, or delete it, between the two.
  LOOP
    SELECT q.id INTO v_id FROM mq_queues q WHERE q.name = p_name;
    IF FOUND THEN RETURN v_id; END IF;
    INSERT INTO mq_queues (name, created_at) VALUES (p_name, clock()) ON CONFLICT (name) DO NOTHING RETURNING id INTO v_id;
    IF FOUND THEN RETURN v_id; END IF;
  END LOOP;
END $$;

-- How many were deleted singly of what stands behind a number; p_done: of them, those that do not count.
CREATE FUNCTION mq_holes(p_holes bigint[], p_behind bigint, p_done bigint[]) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN p_holes = '{}' THEN 0 ELSE (SELECT count(*) FROM unnest(p_holes) h WHERE h > p_behind AND NOT h = ANY (p_done)) END
$$;

${heads}
-- Messages that a queue holds: those that its slowest group has still to read; all, if there is no group.
CREATE FUNCTION mq_size(p_queue int) RETURNS bigint LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT coalesce(sum(p.tail - b.behind - mq_holes(p.holes, b.behind, '{}')), 0)::bigint FROM mq_partitions p CROSS JOIN LATERAL (
    SELECT greatest(p.low, mq_slowest(p_queue, p.id, p.low, p.tail)) AS behind
  ) b WHERE p.queue = p_queue
$$;

-- Wakes those who wait for these queues, by marks of their names: a notice has room for 8,000 bytes.
CREATE FUNCTION mq_tell(p_queues text[]) RETURNS void LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT pg_notify('spillway_' || current_schema(), 'mq:' || CASE WHEN cardinality(p_queues) > 500 THEN '*' ELSE (SELECT string_agg(left(md5(n), 8), ',') FROM unnest(p_queues) n) END)
$$;

-- The effect of a push (store/port.ts, StoreEffect). An item is what one request brings to one partition; its messages come
-- flat, with the number of their item. Told for each: {"ids":[…], "duplicates":{"2":"id"}, "failed":{"0":"code"}}.
CREATE FUNCTION mq_pushed(
  p_verdicts smallint[], p_seqs bigint[], p_partitions uuid[], p_queues text[], p_names text[],
  p_item int[], p_ids uuid[], p_transactions text[], p_traces text[], p_sealed boolean[], p_payloads text, p_queued boolean
) RETURNS json[] LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET jit = off AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_payloads text[] := string_to_array(p_payloads, E'\\x1e');
  v_queue int[]; v_strict boolean; v_new boolean; v_first bigint[]; v_failed text[]; v_dup uuid[];
  v_parts uuid[]; v_tails bigint[]; v_counts bigint[]; v_owners int[];
  v_expected bigint; v_inserted bigint; v_left bigint; v_most bigint; v_asked bigint;
  told json[]; r record;
BEGIN
  IF NOT 2 = ANY (p_verdicts) THEN RETURN array_fill(NULL::json, ARRAY[cardinality(p_verdicts)]); END IF;
  -- Until all are guarded: one that is deleted while this waits is made anew.
  LOOP
    SELECT array_agg(coalesce(q.id, mq_queue(u.name)) ORDER BY u.i), coalesce(bool_or(q.max_size > 0 OR q.encryption_enabled), false), bool_or(q.id IS NULL)
      INTO v_queue, v_strict, v_new
      FROM unnest(p_queues) WITH ORDINALITY u(name, i) LEFT JOIN mq_queues q ON q.name = u.name;
    EXIT WHEN mq_guard(v_queue, false);
  END LOOP;

  -- 1. What may not be stored: as plain text where the queue is sealed, and beyond the queue's size.
  IF v_strict THEN
    v_failed := array_fill(NULL::text, ARRAY[cardinality(p_item)]);
    -- One that is there already, or comes twice, takes no room.
    SELECT array_agg(CASE WHEN x.there THEN 0 ELSE x.first END ORDER BY x.k) INTO v_first FROM (
      SELECT u.k, first_value(u.k) OVER (PARTITION BY p_verdicts[u.item] = 2, p_partitions[u.item], u.tx ORDER BY u.k) AS first,
        EXISTS (SELECT FROM mq_messages m WHERE m.partition = p_partitions[u.item] AND m.transaction_id = u.tx AND m.grp IS NULL) AS there
      FROM unnest(p_item, p_transactions) WITH ORDINALITY u(item, tx, k)
    ) x;
    FOR r IN SELECT q.id, q.max_size, q.encryption_enabled FROM mq_queues q WHERE q.id = ANY (v_queue) AND (q.max_size > 0 OR q.encryption_enabled) ORDER BY q.id LOOP
      IF r.max_size > 0 THEN
        -- One at a time; in the order of the queues, behind the lanes. What is consumed makes room, so that it is counted only
        -- when what was counted last, and has come since, leaves none.
        SELECT q.size_most INTO v_most FROM mq_queues q WHERE q.id = r.id FOR NO KEY UPDATE;
        SELECT count(*) INTO v_asked FROM unnest(p_item, v_first) WITH ORDINALITY u(item, first, k) WHERE v_queue[u.item] = r.id AND u.first = u.k;
        IF v_most IS NULL OR v_most + v_asked > r.max_size THEN v_most := mq_size(r.id); END IF;
        v_left := r.max_size - v_most;
      END IF;
      FOR i IN 1 .. cardinality(p_item) LOOP
        CONTINUE WHEN v_queue[p_item[i]] <> r.id OR p_verdicts[p_item[i]] <> 2;
        IF r.encryption_enabled AND NOT p_sealed[i] THEN v_failed[i] := 'encryption_required';
        ELSIF r.max_size > 0 THEN
          CONTINUE WHEN v_first[i] = 0;
          IF v_first[i] < i THEN v_failed[i] := v_failed[v_first[i]];
          ELSIF v_left <= 0 THEN v_failed[i] := 'queue_full'; ELSE v_left := v_left - 1; END IF;
        END IF;
      END LOOP;
      IF r.max_size > 0 THEN UPDATE mq_queues q SET size_most = r.max_size - v_left WHERE q.id = r.id; END IF;
    END LOOP;
    -- From the queue there is nobody to tell: the operation fails, and comes again, or is kept as a dead letter.
    IF p_queued AND (SELECT bool_or(f IS NOT NULL) FROM unnest(v_failed) f) THEN
      RAISE EXCEPTION '%', (SELECT f FROM unnest(v_failed) f WHERE f IS NOT NULL LIMIT 1) USING ERRCODE = 'SP001';
    END IF;
  END IF;

  -- 2. Numbers, under the partitions' rows, in the order of their ids.
  WITH n AS (
    SELECT p_partitions[u.item] AS part, min(u.item) AS item, count(*) AS n FROM unnest(p_item, v_failed) u(item, failed)
    WHERE p_verdicts[u.item] = 2 AND u.failed IS NULL GROUP BY 1 ORDER BY 1
  ), up AS (
    INSERT INTO mq_partitions AS p (id, queue, name, tail, pushed_at, created_at)
    SELECT n.part, v_queue[n.item], p_names[n.item], n.n, t, t FROM n
    ON CONFLICT (id) DO UPDATE SET tail = p.tail + excluded.tail, pushed_at = t
    RETURNING p.id, p.tail, p.queue
  )
  SELECT array_agg(up.id), array_agg(up.tail), array_agg(n.n), array_agg(up.queue), coalesce(sum(n.n), 0)
    INTO v_parts, v_tails, v_counts, v_owners, v_expected FROM up JOIN n ON n.part = up.id;

  -- 3. The messages. A time under the lock: times stand in the order of the numbers. In whole milliseconds, as it is told: who
  -- asks for what came from such a time on gets it.
  t := date_trunc('milliseconds', clock());
  WITH m AS (
    SELECT p_partitions[u.item] AS part, u.id, u.tx, u.trace, u.sealed, u.payload,
      row_number() OVER (PARTITION BY p_partitions[u.item] ORDER BY u.k) AS rn
    FROM unnest(p_item, p_ids, p_transactions, p_traces, p_sealed, v_payloads, v_failed) WITH ORDINALITY u(item, id, tx, trace, sealed, payload, failed, k)
    WHERE p_verdicts[u.item] = 2 AND u.failed IS NULL
  ), ins AS (
    INSERT INTO mq_messages (partition, seq, id, transaction_id, trace_id, sealed, payload, created_at)
    SELECT m.part, p.tail - p.n + m.rn, m.id, m.tx, m.trace, m.sealed, m.payload, t
    FROM m JOIN unnest(v_parts, v_tails, v_counts) p(id, tail, n) ON p.id = m.part
    ON CONFLICT (partition, transaction_id) WHERE grp IS NULL DO NOTHING
    RETURNING 1
  ) SELECT count(*) INTO v_inserted FROM ins;

  -- 4. Some were there already: once more, without them, so that the numbers have no gaps.
  IF v_inserted < v_expected THEN
    DELETE FROM mq_messages m USING unnest(v_parts, v_tails, v_counts) p(id, tail, n) WHERE m.partition = p.id AND m.seq > p.tail - p.n;
    v_dup := array_fill(NULL::uuid, ARRAY[cardinality(p_item)]);
    FOR r IN
      SELECT u.k, coalesce(m.id, first_value(u.id) OVER w) AS there, m.id IS NOT NULL OR row_number() OVER w > 1 AS dup
      FROM unnest(p_item, p_ids, p_transactions, v_failed) WITH ORDINALITY u(item, id, tx, failed, k)
        LEFT JOIN mq_messages m ON m.partition = p_partitions[u.item] AND m.transaction_id = u.tx AND m.grp IS NULL
      WHERE p_verdicts[u.item] = 2 AND u.failed IS NULL WINDOW w AS (PARTITION BY p_partitions[u.item], u.tx ORDER BY u.k)
    LOOP
      IF r.dup THEN v_dup[r.k] := r.there; END IF;
    END LOOP;
    WITH n AS (
      SELECT p_partitions[u.item] AS part, count(*) FILTER (WHERE u.dup IS NULL) AS n FROM unnest(p_item, v_failed, v_dup) u(item, failed, dup)
      WHERE p_verdicts[u.item] = 2 AND u.failed IS NULL GROUP BY 1
    ), up AS (
      UPDATE mq_partitions p SET tail = p.tail - x.n + n.n FROM n JOIN unnest(v_parts, v_counts) x(id, n) ON x.id = n.part WHERE p.id = n.part
      RETURNING p.id, p.tail, n.n, p.queue
    ) SELECT array_agg(up.id), array_agg(up.tail), array_agg(up.n), array_agg(up.queue) INTO v_parts, v_tails, v_counts, v_owners FROM up;
    INSERT INTO mq_messages (partition, seq, id, transaction_id, trace_id, sealed, payload, created_at)
    SELECT m.part, p.tail - p.n + m.rn, m.id, m.tx, m.trace, m.sealed, m.payload, t
    FROM (
      SELECT p_partitions[u.item] AS part, u.id, u.tx, u.trace, u.sealed, u.payload, row_number() OVER (PARTITION BY p_partitions[u.item] ORDER BY u.k) AS rn
      FROM unnest(p_item, p_ids, p_transactions, p_traces, p_sealed, v_payloads, v_failed, v_dup) WITH ORDINALITY u(item, id, tx, trace, sealed, payload, failed, dup, k)
      WHERE p_verdicts[u.item] = 2 AND u.failed IS NULL AND u.dup IS NULL
    ) m JOIN unnest(v_parts, v_tails, v_counts) p(id, tail, n) ON p.id = m.part;
  END IF;

  -- 5. Groups that had read everything have something to read. A statement of its own: what the partition's lock waited for
  -- is seen here.
  INSERT INTO mq_ready (partition, grp, at, head)
  SELECT p.id, g.id, t + greatest(q.delay_seconds, q.window_seconds) * interval '1 second', CASE WHEN c.head IS NULL THEN p.tail - p.n END
  FROM unnest(v_parts, v_tails, v_counts, v_owners) p(id, tail, n, queue) JOIN mq_queues q ON q.id = p.queue JOIN mq_groups g ON g.queue = p.queue
    LEFT JOIN mq_cursors c ON c.partition = p.id AND c.grp = g.id
  WHERE p.n > 0 AND c.lease IS NULL AND CASE WHEN c.head IS NOT NULL THEN c.head >= p.tail - p.n
    ELSE p.id > g.reached IS NOT TRUE AND (SELECT x.grp FROM mq_ready x WHERE x.partition = p.id AND x.grp = g.id) IS NULL END
  ON CONFLICT (partition, grp) DO NOTHING;
  -- Who waits elsewhere is told with the commit; while all groups have something to read, nobody waits.
  IF FOUND OR v_new THEN PERFORM mq_tell(ARRAY(SELECT DISTINCT q.name FROM mq_queues q WHERE q.id = ANY (v_owners))); END IF;

  SELECT array_agg(CASE WHEN p_verdicts[i.i] = 2 THEN x.told END ORDER BY i.i) INTO told
  FROM generate_series(1, cardinality(p_verdicts)) i(i) LEFT JOIN (
    SELECT m.item, json_build_object('ids', json_agg(coalesce(m.dup, m.id) ORDER BY m.k),
      'duplicates', json_object_agg(m.n, m.dup) FILTER (WHERE m.dup IS NOT NULL), 'failed', json_object_agg(m.n, m.failed) FILTER (WHERE m.failed IS NOT NULL)) AS told
    FROM (
      SELECT u.item, u.id, u.failed, u.dup, u.k, row_number() OVER (PARTITION BY u.item ORDER BY u.k) - 1 AS n
      FROM unnest(p_item, p_ids, v_failed, v_dup) WITH ORDINALITY u(item, id, failed, dup, k)
    ) m GROUP BY m.item
  ) x ON x.item = i.i;
  RETURN told;
END $$;

${beginning}
-- Deletes from the log, up to a number, the oldest p_most.
CREATE FUNCTION mq_cut(p_partition uuid, p_upto bigint, p_most int) RETURNS bigint LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_low bigint; v_upto bigint; v_n bigint;
BEGIN
  SELECT least(p_upto, p.tail), p.low INTO v_upto, v_low FROM mq_partitions p WHERE p.id = p_partition FOR NO KEY UPDATE;
  IF v_upto IS NULL OR v_upto <= v_low THEN RETURN 0; END IF;
  SELECT coalesce(max(x.seq) FILTER (WHERE x.n = p_most), v_upto) INTO v_upto
    FROM (SELECT m.seq, row_number() OVER (ORDER BY m.seq) AS n FROM mq_messages m WHERE m.partition = p_partition AND m.seq <= v_upto ORDER BY m.seq LIMIT p_most) x;
  DELETE FROM mq_messages m WHERE m.partition = p_partition AND m.seq <= v_upto;
  GET DIAGNOSTICS v_n = ROW_COUNT;
  UPDATE mq_partitions p SET low = v_upto, holes = CASE WHEN p.holes = '{}' THEN p.holes ELSE ARRAY(SELECT h FROM unnest(p.holes) h WHERE h > v_upto) END WHERE p.id = p_partition;
  RETURN v_n;
END $$;

-- Empties a queue, or one partition of it: every group stands at the end. Dead letters stay.
CREATE FUNCTION mq_clear(p_queue text, p_partition text) RETURNS bigint LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_n bigint := 0; v_gone bigint; v_tail bigint; r record; v_leases uuid[] := '{}'; v_parts uuid[] := '{}';
BEGIN
  -- Nobody joins meanwhile.
  PERFORM mq_guard(ARRAY(SELECT q.id FROM mq_queues q WHERE q.name = p_queue), false);
  FOR r IN SELECT p.id FROM mq_partitions p JOIN mq_queues q ON q.id = p.queue WHERE q.name = p_queue AND (p_partition IS NULL OR p.name = p_partition) ORDER BY p.id LOOP
    -- A cursor for those who may take from it at this moment, to lock; the others stand at the end, or begin behind it.
    INSERT INTO mq_cursors (partition, grp, head) SELECT r.id, x.grp, 0 FROM mq_ready x WHERE x.partition = r.id ORDER BY x.grp ON CONFLICT (partition, grp) DO NOTHING;
    PERFORM FROM mq_cursors c WHERE c.partition = r.id ORDER BY c.grp FOR UPDATE;
    SELECT v_leases || coalesce(array_agg(c.lease), '{}'), v_parts || coalesce(array_agg(r.id), '{}') INTO v_leases, v_parts FROM mq_cursors c WHERE c.partition = r.id AND c.lease IS NOT NULL;
    UPDATE mq_partitions p SET low = p.tail, holes = '{}', mark = p.tail WHERE p.id = r.id RETURNING p.tail INTO v_tail;
    DELETE FROM mq_messages m WHERE m.partition = r.id;
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    v_n := v_n + v_gone;
    UPDATE mq_cursors c SET head = v_tail, done = '{}', lease = NULL, batch = '{}', open = '{}', tries = '{}', careful = 0, not_before = NULL, moved_at = clock() WHERE c.partition = r.id;
    DELETE FROM mq_ready x WHERE x.partition = r.id;
  END LOOP;
  PERFORM mq_unlease(v_leases, v_parts);
  RETURN v_n;
END $$;

CREATE FUNCTION mq_drop(p_queue text) RETURNS boolean LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_queue int;
BEGIN
  -- By its number from here on: one that is made anew under this name is another.
  SELECT q.id INTO v_queue FROM mq_queues q WHERE q.name = p_queue;
  IF NOT mq_guard(ARRAY[v_queue], true) THEN RETURN false; END IF;
  DELETE FROM mq_messages m USING mq_partitions p WHERE p.queue = v_queue AND m.partition = p.id;
  DELETE FROM mq_traces x USING mq_partitions p WHERE p.queue = v_queue AND x.partition = p.id;
  DELETE FROM mq_cursors x USING mq_partitions p WHERE p.queue = v_queue AND x.partition = p.id;
  DELETE FROM mq_ready x USING mq_partitions p WHERE p.queue = v_queue AND x.partition = p.id;
  DELETE FROM mq_leases l USING mq_groups g WHERE g.queue = v_queue AND l.grp = g.id;
  DELETE FROM mq_queues q WHERE q.id = v_queue;
  RETURN FOUND;
END $$;

-- Takes single messages out of the log. Whoever has one leased is told that it is unknown.
CREATE FUNCTION mq_remove(p_partition uuid, p_transaction text) RETURNS boolean LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_seqs bigint[]; v_low bigint; c record; v_leases uuid[] := '{}'; v_parts uuid[] := '{}';
BEGIN
  -- In the order in which everybody locks: nobody delivers it meanwhile, and nobody pushes.
  PERFORM FROM mq_cursors x WHERE x.partition = p_partition ORDER BY x.grp FOR UPDATE;
  PERFORM FROM mq_partitions p WHERE p.id = p_partition FOR NO KEY UPDATE;
  WITH gone AS (DELETE FROM mq_messages m WHERE m.partition = p_partition AND m.transaction_id = p_transaction AND m.grp IS NULL RETURNING m.seq),
    gone_too AS (DELETE FROM mq_messages m WHERE m.partition = p_partition AND m.transaction_id = p_transaction AND m.grp IS NOT NULL RETURNING m.seq)
  SELECT array_agg(x.seq) INTO v_seqs FROM (SELECT seq FROM gone UNION ALL SELECT seq FROM gone_too) x;
  IF v_seqs IS NULL THEN RETURN false; END IF;
  SELECT coalesce((SELECT m.seq - 1 FROM mq_messages m WHERE m.partition = p_partition AND m.seq > p.low ORDER BY m.seq LIMIT 1), p.tail) INTO v_low FROM mq_partitions p WHERE p.id = p_partition;
  UPDATE mq_partitions p SET low = v_low, holes = ARRAY(SELECT h FROM unnest(p.holes || v_seqs) h WHERE h > v_low) WHERE p.id = p_partition;
  FOR c IN SELECT x.grp, x.open FROM mq_cursors x WHERE x.partition = p_partition AND x.open && v_seqs ORDER BY x.grp LOOP
    UPDATE mq_cursors x SET open = ARRAY(SELECT o FROM unnest(x.open) o WHERE NOT o = ANY (v_seqs)), done = x.done || ARRAY(SELECT o FROM unnest(x.open) o WHERE o = ANY (v_seqs))
      WHERE x.partition = p_partition AND x.grp = c.grp;
    IF c.open <@ v_seqs THEN v_leases := v_leases || mq_end(p_partition, c.grp); v_parts := v_parts || p_partition; END IF;
  END LOOP;
  PERFORM mq_unlease(v_leases, v_parts);
  RETURN true;
END $$;
`,
}
