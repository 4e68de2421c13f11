/** Made from the .sql files by scripts/generate-sql.mjs; not meant to be edited. */
export const messagesSql = {
  name: 'messages',
  tables: [
    {
      id: '0001-messages',
      sql: `-- Messages: a log per partition, a cursor per partition and consumer group.
--
--   push ──► mq_messages (partition, seq) ──► for each group: idle ──push──► ready ──pop──► leased ──all acked──►
-- idle or ready
--                                                                              ▲              │
--                                                                              └── expired ◄──┘  (every delivery
-- counts)
--
-- A partition is a lane (the same 128 bits), so what is pushed at once and what was queued come in one order. Its
-- messages have numbers of their own, given under the partition's row lock: without gaps, in commit order. A cursor
-- that has passed a number can never have missed a smaller one.
--
-- Invariant: a group that has something to read in a partition (head < tail) has exactly one of a row in mq_ready and
-- a lease. Push adds the row where the group was idle. Ending a lease adds it where there is more, and reads the tail
-- under a share lock of the partition before it decides that there is not.
--
-- Of a lease's messages, batch are those delivered, open those not acked yet, done all beyond head that are settled.
-- Head moves when the last one is acked: to before the first that has to be delivered again. tries counts failed
-- deliveries. A batch that expired is delivered one by one up to careful: what fails alone is at fault alone.
--
-- Lock order: lanes, mq_partitions (by id), mq_messages; mq_cursors (by partition, group), mq_partitions, mq_messages,
-- mq_leases (by id, last of all). Push never locks cursors, and pop takes no lock that it would have to wait for.

CREATE TABLE mq_queues (
  id                  int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name                text NOT NULL UNIQUE,
  namespace           text,
  task                text,
  lease_seconds       int NOT NULL DEFAULT 300 CHECK (lease_seconds > 0),
  retry_limit         int NOT NULL DEFAULT 3 CHECK (retry_limit >= 0),
  retry_delay_ms      int NOT NULL DEFAULT 1000 CHECK (retry_delay_ms >= 0),
  max_size            bigint NOT NULL DEFAULT 0 CHECK (max_size >= 0),           -- 0: no limit
  -- higher first, among queues that a pop names together
  priority            int NOT NULL DEFAULT 0,
  delay_seconds       int NOT NULL DEFAULT 0 CHECK (delay_seconds >= 0),
  window_seconds      int NOT NULL DEFAULT 0 CHECK (window_seconds >= 0),
  retention_seconds   int NOT NULL DEFAULT 0 CHECK (retention_seconds >= 0),     -- 0: for ever
  completed_retention_seconds int NOT NULL DEFAULT 0 CHECK (completed_retention_seconds >= 0),
  retention_enabled   boolean NOT NULL DEFAULT false,
  max_wait_seconds    int NOT NULL DEFAULT 0 CHECK (max_wait_seconds >= 0),      -- 0: for ever
  dead_letter_queue   boolean NOT NULL DEFAULT false,
  dlq_after_max_retries boolean NOT NULL DEFAULT false,
  encryption_enabled  boolean NOT NULL DEFAULT false,
  -- it holds no more than this; NULL: nobody knows. Counting costs a look at each partition
  size_most           bigint,
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
  -- consumed by all groups at marked_at: deleted when that is long enough ago
  mark       bigint NOT NULL DEFAULT 0,
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
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
  autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_vacuum_cost_delay = 0);
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
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
  autovacuum_vacuum_cost_delay = 0);
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
  -- false: the queue has no dead letters, this is the record that it was skipped
  is_letter      boolean NOT NULL,
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
`,
    },
  ],
  functions: [
    {
      name: 'ack',
      sql: `-- Acks of delivered messages.

-- The messages of a transaction id that a group reads: for all groups, and replayed for it alone. Two arms, so that
-- each uses its index. Without a setting of its own, so that it is inlined: an ack takes as long as with the query in
-- mq_ack (100 messages, one returned: 1.19 ms both).
CREATE OR REPLACE FUNCTION mq_find(p_partition uuid, p_transaction text, p_grp int) RETURNS SETOF bigint
  LANGUAGE sql STABLE AS $$
  SELECT x.seq FROM mq_messages x
    WHERE x.partition = p_partition AND x.transaction_id = p_transaction AND x.grp IS NULL
  UNION ALL SELECT x.seq FROM mq_messages x
    WHERE x.partition = p_partition AND x.transaction_id = p_transaction AND x.grp IS NOT NULL AND x.grp = p_grp
$$;

-- Acks, for any number of partitions and groups. Outcomes, in the given order: done, retry, dead,
-- skipped, unknown (no such message, or not delivered to this group), lost (the lease has expired, or is another's).
CREATE OR REPLACE FUNCTION mq_ack(
  p_partitions uuid[], p_groups text[], p_leases uuid[], p_transactions text[], p_statuses text[], p_errors text[]
) RETURNS text[]
  LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET jit = off AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  outcomes text[] := array_fill('unknown'::text, ARRAY[cardinality(p_partitions)]);
  r record; a record; c mq_cursors; v_limit int; v_delay int; v_letters boolean; v_grp int; v_live boolean;
  v_buried bigint[]; v_why text[]; v_letter bigint[]; v_letter_why text[]; v_n int; v_done int; v_seqs bigint[];
  v_leases uuid[] := '{}'; v_parts uuid[] := '{}';
BEGIN
  FOR r IN
    SELECT u.part, u.grp, array_agg(u.i::int) AS ixs, array_agg(u.tx) AS txs, array_agg(u.lease) AS leases,
      array_agg(u.status) AS statuses, array_agg(u.error) AS errors
    FROM unnest(p_partitions, p_groups, p_transactions, p_leases, p_statuses, p_errors)
      WITH ORDINALITY u(part, grp, tx, lease, status, error, i)
    GROUP BY u.part, u.grp ORDER BY u.part, u.grp LOOP
    SELECT g.id, q.retry_limit, q.retry_delay_ms, q.dead_letter_queue OR q.dlq_after_max_retries
      INTO v_grp, v_limit, v_delay, v_letters
      FROM mq_partitions p JOIN mq_queues q ON q.id = p.queue JOIN mq_groups g ON g.queue = q.id AND g.name = r.grp
      WHERE p.id = r.part;
    CONTINUE WHEN NOT FOUND;
    SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = r.part AND x.grp = v_grp FOR UPDATE;
    CONTINUE WHEN NOT FOUND;
    t := clock();
    v_live := c.lease IS NOT NULL AND EXISTS (SELECT FROM mq_leases l WHERE l.id = c.lease AND l.until > t);
    -- The usual case, a batch completed as a whole, needs no loop over its messages.
    IF v_live AND cardinality(r.txs) = cardinality(c.open)
        AND NOT EXISTS (SELECT FROM unnest(r.statuses, r.leases) u(status, lease)
            WHERE u.status <> 'completed' OR u.lease <> c.lease) THEN
      SELECT array_agg(x.seq) INTO v_seqs FROM (
        SELECT DISTINCT m.seq FROM unnest(r.txs) u(tx)
          JOIN mq_messages m ON m.partition = r.part AND m.transaction_id = u.tx AND m.grp IS NULL ORDER BY m.seq) x;
      IF v_seqs = c.open THEN
        v_n := cardinality(outcomes);
        IF cardinality(r.ixs) = v_n THEN outcomes := array_fill('done'::text, ARRAY[v_n]);
        ELSE FOREACH v_n IN ARRAY r.ixs LOOP outcomes[v_n] := 'done'; END LOOP; END IF;
        v_leases := v_leases || mq_end(r.part, v_grp, v_seqs); v_parts := v_parts || r.part;
        CONTINUE;
      END IF;
    END IF;
    v_buried := '{}'; v_why := '{}'; v_letter := '{}'; v_letter_why := '{}'; v_done := 0;
    FOR a IN
      SELECT u.i, u.lease, u.status, u.error, m.seq
        FROM unnest(r.ixs, r.txs, r.leases, r.statuses, r.errors) u(i, tx, lease, status, error)
        LEFT JOIN LATERAL mq_find(r.part, u.tx, v_grp) m(seq) ON true
      ORDER BY u.i, m.seq = ANY (c.open)
    LOOP
      CONTINUE WHEN a.seq IS NULL;
      IF NOT v_live OR a.lease IS DISTINCT FROM c.lease AND a.lease IS NOT NULL THEN
        outcomes[a.i] := 'lost'; CONTINUE;
      END IF;
      -- Already acked, or never delivered.
      IF NOT a.seq = ANY (c.open) THEN
        IF outcomes[a.i] = 'unknown' THEN outcomes[a.i] := CASE
          WHEN a.seq <= c.head OR a.seq = ANY (c.batch) THEN 'lost' ELSE 'unknown' END; END IF;
        CONTINUE;
      END IF;
      c.open := array_remove(c.open, a.seq);
      IF a.status = 'completed' THEN
        outcomes[a.i] := 'done'; c.done := c.done || a.seq; v_done := v_done + 1;
        CONTINUE;
      END IF;
      -- Returned, not failed: redelivered at once, and not counted.
      IF a.status = 'retry' THEN outcomes[a.i] := 'retry'; CONTINUE; END IF;
      v_n := coalesce((c.tries->>(a.seq::text))::int, 0) + 1;
      c.tries := c.tries || jsonb_build_object(a.seq::text, v_n);
      IF a.status = 'dlq' THEN
        outcomes[a.i] := 'dead'; c.done := c.done || a.seq;
        v_letter := v_letter || a.seq; v_letter_why := v_letter_why || a.error;
      ELSIF v_n > v_limit THEN
        outcomes[a.i] := CASE WHEN v_letters THEN 'dead' ELSE 'skipped' END; c.done := c.done || a.seq;
        v_buried := v_buried || a.seq; v_why := v_why || a.error;
      ELSE
        outcomes[a.i] := 'retry';
        c.not_before := greatest(c.not_before, t + v_delay * interval '1 ms');
      END IF;
    END LOOP;
    IF v_buried <> '{}' THEN PERFORM mq_bury(r.part, v_grp, v_buried, v_why, c.tries, false); END IF;
    IF v_letter <> '{}' THEN PERFORM mq_bury(r.part, v_grp, v_letter, v_letter_why, c.tries, true); END IF;
    CONTINUE WHEN NOT v_live;
    UPDATE mq_cursors x
      SET open = c.open, done = c.done, tries = c.tries, not_before = c.not_before, consumed = x.consumed + v_done,
        moved_at = t WHERE x.partition = r.part AND x.grp = v_grp;
    IF c.open = '{}' THEN v_leases := v_leases || mq_end(r.part, v_grp); v_parts := v_parts || r.part; END IF;
  END LOOP;
  PERFORM mq_unlease(v_leases, v_parts);
  RETURN outcomes;
END $$;
`,
    },
    {
      name: 'deliveries',
      sql: `-- How a delivery ends. Every end (the last ack, expiry, seek) calls mq_end, which moves the cursor and decides
-- whether there is more to read.

-- Puts a cursor without lease where it belongs: ready, or idle. The caller holds its lock and has written its head.
CREATE OR REPLACE FUNCTION mq_requeue(
  p_partition uuid, p_grp int, p_head bigint, p_not_before timestamptz
) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_tail bigint; v_pushed timestamptz; v_queue int; v_at timestamptz; q record;
BEGIN
  SELECT p.tail, p.pushed_at, p.queue INTO v_tail, v_pushed, v_queue FROM mq_partitions p WHERE p.id = p_partition;
  IF p_head >= v_tail THEN
    -- A concurrent push still sees the lease and leaves the row to us.
    SELECT p.tail, p.pushed_at, p.queue INTO v_tail, v_pushed, v_queue FROM mq_partitions p
      WHERE p.id = p_partition FOR SHARE;
  END IF;
  IF v_tail IS NULL OR p_head >= v_tail THEN RETURN; END IF;
  SELECT x.delay_seconds, x.window_seconds INTO q FROM mq_queues x WHERE x.id = v_queue;
  v_at := greatest(clock(), p_not_before);
  IF q.window_seconds > 0 THEN v_at := greatest(v_at, v_pushed + q.window_seconds * interval '1 second'); END IF;
  IF q.delay_seconds > 0 THEN
    v_at := greatest(v_at, (SELECT m.created_at FROM mq_messages m WHERE m.partition = p_partition AND m.seq > p_head
          ORDER BY m.seq LIMIT 1) + q.delay_seconds * interval '1 second');
  END IF;
  INSERT INTO mq_ready (partition, grp, at) VALUES (p_partition, p_grp, v_at)
    ON CONFLICT (partition, grp) DO UPDATE SET at = excluded.at;
END $$;

-- A delivery has ended: it has no open messages. The caller holds the cursor's lock, and has to call \`mq_unlease\` for
-- the lease after the last cursor.
-- p_done: settled by this call, by consumers.
CREATE OR REPLACE FUNCTION mq_end(p_partition uuid, p_grp int, p_done bigint[] DEFAULT '{}') RETURNS uuid
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  c mq_cursors; v_head bigint; v_done bigint[];
BEGIN
  SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = p_partition AND x.grp = p_grp;
  v_done := c.done || p_done;
  -- The usual case: all of it is settled by one call.
  IF cardinality(p_done) < cardinality(c.batch) THEN
    SELECT min(x.seq) - 1 INTO v_head FROM (SELECT unnest(c.batch) EXCEPT SELECT unnest(v_done)) x(seq);
  END IF;
  v_head := greatest(c.head, coalesce(v_head, (SELECT max(x.seq) FROM unnest(c.batch) x(seq))));
  UPDATE mq_cursors x SET lease = NULL, batch = '{}', open = '{}', head = v_head,
      done = CASE WHEN c.done = '{}' AND cardinality(p_done) = cardinality(c.batch) THEN '{}'
        ELSE ARRAY(SELECT d FROM unnest(v_done) d WHERE d > v_head) END,
      tries = CASE WHEN c.tries = '{}' THEN c.tries
        ELSE coalesce((SELECT jsonb_object_agg(e.key, e.value) FROM jsonb_each(c.tries) e
              WHERE e.key::bigint > v_head), '{}') END,
      not_before = NULL, consumed = x.consumed + cardinality(p_done), moved_at = CASE
        WHEN p_done = '{}' THEN x.moved_at ELSE clock() END
    WHERE x.partition = p_partition AND x.grp = p_grp;
  PERFORM mq_requeue(p_partition, p_grp, v_head, c.not_before);
  RETURN c.lease;
END $$;

-- Takes partitions out of leases, and ends leases without partitions. In the order of their ids: otherwise acks of
-- several partitions of one lease would deadlock.
CREATE OR REPLACE FUNCTION mq_unlease(p_leases uuid[], p_partitions uuid[]) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  IF cardinality(p_leases) = 0 THEN RETURN; END IF;
  -- The usual case: one lease with one partition.
  DELETE FROM mq_leases l WHERE cardinality(p_leases) = 1 AND l.id = p_leases[1] AND l.partitions <@ p_partitions;
  IF FOUND THEN RETURN; END IF;
  PERFORM FROM mq_leases l WHERE l.id = ANY (p_leases) ORDER BY l.id FOR UPDATE;
  UPDATE mq_leases l SET partitions = ARRAY(SELECT p FROM unnest(l.partitions) p WHERE NOT p = ANY (u.parts))
    FROM (SELECT x.lease, array_agg(x.part) AS parts FROM unnest(p_leases, p_partitions) x(lease, part)
        GROUP BY x.lease) u WHERE l.id = u.lease;
  DELETE FROM mq_leases l WHERE l.id = ANY (p_leases) AND l.partitions = '{}';
END $$;

-- Keeps an abandoned message: as a dead letter if its queue has those, otherwise as a record that it was skipped.
CREATE OR REPLACE FUNCTION mq_bury(
  p_partition uuid, p_grp int, p_seqs bigint[], p_errors text[], p_tries jsonb, p_letter boolean
) RETURNS void
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  INSERT INTO mq_dead (message_id, partition, seq, queue, partition_name, namespace, task, grp, transaction_id,
      trace_id, sealed, payload, error, retry_count, is_letter, created_at, moved_at)
  SELECT m.id, m.partition, m.seq, q.name, p.name, q.namespace, q.task, g.name, m.transaction_id, m.trace_id,
    m.sealed, m.payload, u.error,
    coalesce((p_tries->>(m.seq::text))::int, 0), p_letter OR q.dead_letter_queue
      OR q.dlq_after_max_retries, m.created_at, clock()
  FROM unnest(p_seqs, p_errors) u(seq, error) JOIN mq_messages m ON m.partition = p_partition AND m.seq = u.seq
    JOIN mq_partitions p ON p.id = m.partition JOIN mq_queues q ON q.id = p.queue JOIN mq_groups g ON g.id = p_grp
$$;

-- Abandons messages that a group has not read in time: the oldest p_most. Returns how many. The caller holds
-- the lock of the cursor, which has no lease.
CREATE OR REPLACE FUNCTION mq_abandon(p_partition uuid, p_grp int, p_upto bigint, p_most int) RETURNS bigint
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  c mq_cursors; v_head bigint; v_seqs bigint[];
BEGIN
  SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = p_partition AND x.grp = p_grp;
  v_seqs := ARRAY(SELECT m.seq FROM mq_messages m
      WHERE m.partition = p_partition AND m.seq > c.head AND m.seq <= p_upto AND NOT m.seq = ANY (c.done)
        AND (m.grp IS NULL OR m.grp = p_grp) ORDER BY m.seq LIMIT p_most);
  -- More are left: the next call continues.
  v_head := CASE WHEN cardinality(v_seqs) = p_most THEN v_seqs[p_most] ELSE greatest(c.head, p_upto) END;
  PERFORM mq_bury(p_partition, p_grp, v_seqs,
      array_fill('It waited longer than maxWaitTimeSeconds.'::text, ARRAY[cardinality(v_seqs)]), c.tries, false);
  UPDATE mq_cursors x SET head = v_head, done = ARRAY(SELECT d FROM unnest(x.done) d WHERE d > v_head)
    WHERE x.partition = p_partition AND x.grp = p_grp;
  RETURN cardinality(v_seqs);
END $$;

-- Ends deliveries whose lease has expired. Every open message counts a failed delivery. A message that was delivered
-- alone and has used up its tries is abandoned; the others are delivered one by one from now on.
CREATE OR REPLACE FUNCTION mq_expire(p_grp int, p_most int) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  r record; c mq_cursors; v_limit int; v_tries jsonb; v_leases uuid[] := '{}'; v_parts uuid[] := '{}';
BEGIN
  FOR r IN
    SELECT l.id, l.grp, u.partition
      FROM (SELECT x.* FROM mq_leases x WHERE x.until <= t AND (p_grp IS NULL OR x.grp = p_grp) ORDER BY x.until
          LIMIT p_most) l, unnest(l.partitions) u(partition)
    ORDER BY u.partition, l.grp
  LOOP
    SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = r.partition AND x.grp = r.grp AND x.lease = r.id
      FOR UPDATE SKIP LOCKED;
    CONTINUE WHEN NOT FOUND OR NOT EXISTS (SELECT FROM mq_leases l WHERE l.id = r.id AND l.until <= t);
    v_tries := c.tries
      || coalesce((SELECT jsonb_object_agg(o::text, coalesce((c.tries->>(o::text))::int, 0) + 1)
            FROM unnest(c.open) o), '{}');
    SELECT q.retry_limit INTO v_limit FROM mq_partitions p JOIN mq_queues q ON q.id = p.queue WHERE p.id = r.partition;
    IF cardinality(c.batch) = 1 AND cardinality(c.open) = 1 AND (v_tries->>(c.open[1]::text))::int > v_limit THEN
      PERFORM mq_bury(r.partition, r.grp, c.open, ARRAY['The lease expired ' || (v_limit + 1) || ' times.'], v_tries,
          false);
      c.done := c.done || c.open;
    END IF;
    UPDATE mq_cursors x
      SET tries = v_tries, done = c.done, careful = CASE
        WHEN cardinality(c.batch) > 1 THEN (SELECT max(b) FROM unnest(c.batch) b) ELSE x.careful END
      WHERE x.partition = r.partition AND x.grp = r.grp;
    v_leases := v_leases || mq_end(r.partition, r.grp); v_parts := v_parts || r.partition;
  END LOOP;
  PERFORM mq_unlease(v_leases, v_parts);
  -- Its queue or group was deleted: no cursor names the lease any more.
  DELETE FROM mq_leases l
    WHERE l.until <= t AND (p_grp IS NULL OR l.grp = p_grp) AND NOT EXISTS (SELECT FROM mq_cursors c
        WHERE c.lease = l.id AND c.partition = ANY (l.partitions) AND c.grp = l.grp);
  RETURN cardinality(v_parts);
END $$;

CREATE OR REPLACE FUNCTION mq_extend(p_lease uuid, p_seconds int) RETURNS timestamptz
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  UPDATE mq_leases l
    SET until = greatest(l.until,
        clock() + coalesce(p_seconds, (SELECT q.lease_seconds FROM mq_groups g JOIN mq_queues q ON q.id = g.queue
              WHERE g.id = l.grp)) * interval '1 second')
  WHERE l.id = p_lease AND l.until > clock() RETURNING l.until
$$;
`,
    },
    {
      name: 'groups',
      sql: `-- Where a consumer group is, and how it begins.
--
-- A new group must not write a row for each of 20,000 partitions, so it joins them in slices, in the order of their
-- ids, up to 'reached' (NULL: all of them). Every pop of a group that has not reached all of them joins the next
-- slice, and no pop reports "nothing" before the group has reached all. Joining writes mq_ready for partitions with
-- something to read, and nothing for the others. A cursor is written when the group first takes from the partition;
-- until then:
--
--   a row in mq_ready                  its head is where the group begins
--   joined, and no row in mq_ready     the group has nothing to read: its head is the tail
--   not joined                         nothing was read; push leaves it alone, joining finds what was pushed
--
-- So mode 'new', or a time in the future, has nothing to join: the first push after the subscription writes the row
-- with the head before it, whatever clocks say. A cursor (seek, giving up, a pop of one partition) joins its partition
-- ahead of the slice, which then skips it. Joining holds the queue's guard exclusively, so that no push can miss it:
-- see mq_guard.

-- Where a group is in a partition. p_cursor: of mq_cursors; p_ready: of mq_ready; p_reached: of mq_groups.
CREATE OR REPLACE FUNCTION mq_head(
  p_cursor bigint, p_ready bigint, p_reached uuid, p_partition uuid, p_low bigint, p_tail bigint
) RETURNS bigint
  LANGUAGE sql IMMUTABLE PARALLEL SAFE
  RETURN coalesce(p_cursor, p_ready, CASE WHEN p_partition > p_reached THEN p_low ELSE p_tail END);

-- Where the slowest group of a partition's queue is; NULL: there is no group.
CREATE OR REPLACE FUNCTION mq_slowest(p_queue int, p_partition uuid, p_low bigint, p_tail bigint) RETURNS bigint
  LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT min(mq_head(c.head, r.head, g.reached, p_partition, p_low, p_tail)) FROM mq_groups g
    LEFT JOIN mq_cursors c ON c.partition = p_partition AND c.grp = g.id
    LEFT JOIN mq_ready r ON r.partition = p_partition AND r.grp = g.id WHERE g.queue = p_queue
$$;

-- Starts a group, or continues to: at the beginning, at new messages, or at a time.
-- Joins the next p_slice partitions; p_partition: that one, if it exists. p_most: the maximum of groups of the queue.
-- NULL: the queue was deleted; 0: it has the maximum of groups.
CREATE OR REPLACE FUNCTION mq_subscribe(
  p_queue int, p_group text, p_mode text, p_from timestamptz, p_partition text DEFAULT NULL,
  p_most int DEFAULT NULL, p_slice int DEFAULT 500
) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  g mq_groups; v_last uuid; v_head bigint;
BEGIN
  -- Without the guard, for which pushes wait, if there is nothing to do.
  SELECT x.* INTO g FROM mq_groups x WHERE x.queue = p_queue AND x.name = p_group AND x.reached IS NULL;
  IF FOUND THEN RETURN g.id; END IF;
  IF NOT mq_guard(ARRAY[p_queue], true) THEN RETURN NULL; END IF;
  SELECT x.* INTO g FROM mq_groups x WHERE x.queue = p_queue AND x.name = p_group;
  IF NOT FOUND THEN
    IF p_most <= (SELECT count(*) FROM mq_groups x WHERE x.queue = p_queue) THEN RETURN 0; END IF;
    -- The slowest group decides how much a queue holds.
    UPDATE mq_queues q SET size_most = NULL WHERE q.id = p_queue AND q.size_most IS NOT NULL;
    INSERT INTO mq_groups (queue, name, mode, since, reached, starts, created_at)
      VALUES (p_queue, p_group, p_mode, coalesce(p_from, clock()),
      CASE WHEN p_mode = 'all' OR p_mode = 'time'
        AND p_from <= date_trunc('milliseconds', clock()) THEN '00000000-0000-0000-0000-000000000000'::uuid END, CASE
          WHEN p_mode = 'time' THEN p_from END, clock()) RETURNING * INTO g;
  END IF;
  IF g.reached IS NULL THEN RETURN g.id; END IF;
  IF p_partition IS NOT NULL THEN
    INSERT INTO mq_cursors (partition, grp, head) SELECT p.id, g.id, mq_start(p.id, p.low, g.starts)
      FROM mq_partitions p
      WHERE p.queue = p_queue AND p.name = p_partition AND p.id > g.reached ON CONFLICT (partition, grp) DO NOTHING
      RETURNING partition, head INTO v_last, v_head;
    IF FOUND THEN PERFORM mq_requeue(v_last, g.id, v_head, NULL); END IF;
    IF EXISTS (SELECT FROM mq_partitions p WHERE p.queue = p_queue AND p.name = p_partition) THEN RETURN g.id; END IF;
  END IF;
  SELECT p.id INTO v_last FROM mq_partitions p WHERE p.queue = p_queue AND p.id > g.reached
    ORDER BY p.id OFFSET p_slice - 1 LIMIT 1;
  -- The oldest partitions come first.
  INSERT INTO mq_ready (partition, grp, at, head) SELECT p.id, g.id, p.created_at, s.head
    FROM mq_partitions p LEFT JOIN mq_cursors c ON c.partition = p.id AND c.grp = g.id
      CROSS JOIN LATERAL (SELECT mq_start(p.id, p.low, g.starts) AS head) s
    WHERE p.queue = p_queue AND p.id > g.reached AND p.id > v_last IS NOT TRUE AND c.head IS NULL AND s.head < p.tail
    ORDER BY p.created_at, p.name;
  UPDATE mq_groups x SET reached = v_last WHERE x.id = g.id;
  RETURN g.id;
END $$;

-- The last message before a time. Times are in the order of the numbers, so bisection finds it.
CREATE OR REPLACE FUNCTION mq_before(p_partition uuid, p_at timestamptz) RETURNS bigint
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_low bigint; v_high bigint; v_mid bigint; v_seq bigint; v_at timestamptz;
BEGIN
  SELECT p.low, p.tail INTO v_low, v_high FROM mq_partitions p WHERE p.id = p_partition;
  WHILE v_low < v_high LOOP
    v_mid := (v_low + v_high + 1) / 2;
    SELECT m.seq, m.created_at INTO v_seq, v_at FROM mq_messages m
      WHERE m.partition = p_partition AND m.seq >= v_mid AND m.seq <= v_high ORDER BY m.seq LIMIT 1;
    IF FOUND AND v_at < p_at THEN v_low := v_seq; ELSE v_high := v_mid - 1; END IF;
  END LOOP;
  RETURN coalesce(v_low, 0);
END $$;

-- Where a group begins in a partition that it has not joined.
CREATE OR REPLACE FUNCTION mq_start(p_partition uuid, p_low bigint, p_starts timestamptz) RETURNS bigint
  LANGUAGE sql STABLE
  RETURN CASE WHEN p_starts IS NULL THEN p_low ELSE mq_before(p_partition, p_starts) END;

-- Ends groups of this name, of one queue or of all. p_forget false: each starts again after the time at which it
-- first started.
CREATE OR REPLACE FUNCTION mq_unsubscribe(
  p_group text, p_queue text, p_forget boolean
) RETURNS TABLE (queue text, partitions bigint)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  r record;
BEGIN
  PERFORM mq_guard(ARRAY(SELECT g.queue FROM mq_groups g JOIN mq_queues q ON q.id = g.queue
        WHERE g.name = p_group AND (p_queue IS NULL OR q.name = p_queue)), true);
  FOR r IN SELECT g.id, g.queue, g.mode, g.since, q.name, (SELECT count(*) FROM mq_cursors c WHERE c.grp = g.id) AS n
           FROM mq_groups g JOIN mq_queues q ON q.id = g.queue
           WHERE g.name = p_group AND (p_queue IS NULL OR q.name = p_queue) ORDER BY g.id LOOP
    DELETE FROM mq_cursors c WHERE c.grp = r.id;
    DELETE FROM mq_ready x WHERE x.grp = r.id;
    DELETE FROM mq_leases l WHERE l.grp = r.id;
    DELETE FROM mq_groups g WHERE g.id = r.id;
    IF NOT p_forget THEN PERFORM mq_subscribe(r.queue, p_group, CASE WHEN r.mode = 'all' THEN 'all'
        ELSE 'time' END, r.since); END IF;
    queue := r.name; partitions := r.n;
    RETURN NEXT;
  END LOOP;
END $$;
`,
    },
    {
      name: 'pop',
      sql: `-- Pop takes partitions that are ready, the longest ready first, one after the other.
--
-- Up to p_batch messages of up to p_partitions partitions of the first queue with messages, under one lease. They end
-- at p_bytes of payload, as stored, but there is at least one. A partition whose next message does not fit keeps its
-- turn.
--
-- One row with a list for each column; payloads are joined by record separators.
--   due_ms   when the next message may be due, if none is now
--   leased   some messages have to be acked
--   more     1,000 messages were abandoned, and the caller has to pop again
--   missing  queues in which the group has not started, or not joined all partitions: the caller calls mq_subscribe for
--            each, in a separate statement, and to pop again if it got nothing. The guard that mq_subscribe takes
--            must not be held together with anything that others wait for.
--
-- Many pops are made by one statement, whose answer has to be bounded too: after p_flush bytes the rest take nothing
-- and return more. The sum is kept in a setting of the transaction.
--
-- The usual path is one function: as steps of their own, taking a partition and reading its messages made a pop cost 6
-- to 9% more. Only rare cases are separate. Those functions run with the settings of mq_pop.
CREATE OR REPLACE FUNCTION mq_pop(
  p_queue text, p_namespace text, p_task text, p_partition text, p_group text, p_batch int, p_partitions int,
  p_auto boolean, p_lease uuid, p_mode text, p_from timestamptz, p_bytes int, p_flush int,
  OUT queue text, OUT namespace text, OUT task text, OUT parts uuid[], OUT names text[], OUT ix int[],
  OUT ids uuid[], OUT transactions text[], OUT traces text[], OUT sealed boolean[], OUT payloads text,
  OUT created_ms bigint[], OUT tries int[], OUT due_ms bigint, OUT leased boolean, OUT more boolean,
  OUT missing int[]
)
  LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET jit = off
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  q mq_queues; c mq_cursors; m record; v_grp int; v_reached uuid; v_due timestamptz;
  v_part uuid; v_name text; v_pushed timestamptz; v_head bigint; v_at timestamptz;
  v_left int; v_bytes bigint := 0; v_most int := 1000;
  v_flushed bigint := nullif(current_setting('spillway.popped_bytes', true), '');
BEGIN
  ix := '{}'; payloads := ''; more := v_flushed >= p_flush;
  IF more THEN RETURN; END IF;
  more := false;
  IF p_queue IS NOT NULL AND p_mode <> 'all' THEN PERFORM mq_queue(p_queue); END IF;
  FOR q IN SELECT x.* FROM mq_queues x WHERE CASE WHEN p_queue IS NOT NULL THEN x.name = p_queue
      ELSE (p_namespace IS NULL OR x.namespace = p_namespace) AND (p_task IS NULL OR x.task = p_task) END
      ORDER BY x.priority DESC, x.name LOOP
    SELECT g.id, g.reached INTO v_grp, v_reached FROM mq_groups g WHERE g.queue = q.id AND g.name = p_group;
    IF NOT FOUND THEN missing := missing || q.id; END IF;
    -- Do not skip a queue of higher priority whose content is not known yet.
    CONTINUE WHEN missing IS NOT NULL;
    IF EXISTS (SELECT FROM mq_leases l WHERE l.grp = v_grp AND l.until <= t) THEN
      PERFORM mq_expire(v_grp, 100);
      t := clock();
    END IF;
    v_left := p_batch; parts := '{}'; names := '{}'; leased := false;
    LOOP
      EXIT WHEN v_left <= 0 OR cardinality(parts) >= p_partitions OR v_bytes >= p_bytes
        OR p_partition IS NOT NULL AND cardinality(parts) > 0;
      IF p_partition IS NULL THEN
        DELETE FROM mq_ready r WHERE r.ctid = (
            SELECT x.ctid FROM mq_ready x WHERE x.grp = v_grp AND x.at <= t ORDER BY x.at LIMIT 1
            FOR UPDATE SKIP LOCKED)
          RETURNING r.partition, r.at, r.head INTO v_part, v_at, v_head;
      ELSE
        DELETE FROM mq_ready r WHERE r.ctid = (
            SELECT x.ctid FROM mq_partitions p JOIN mq_ready x ON x.partition = p.id AND x.grp = v_grp AND x.at <= t
            WHERE p.queue = q.id AND p.name = p_partition FOR UPDATE OF x SKIP LOCKED)
          RETURNING r.partition, r.at, r.head INTO v_part, v_at, v_head;
      END IF;
      EXIT WHEN v_part IS NULL;
      SELECT p.name, p.pushed_at INTO v_name, v_pushed FROM mq_partitions p WHERE p.id = v_part;
      SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = v_part AND x.grp = v_grp FOR UPDATE;
      IF NOT FOUND THEN
        INSERT INTO mq_cursors (partition, grp, head) VALUES (v_part, v_grp, coalesce(v_head, 0))
          ON CONFLICT (partition, grp) DO NOTHING;
        SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = v_part AND x.grp = v_grp FOR UPDATE;
      END IF;
      -- When its lease ends, it becomes ready again.
      CONTINUE WHEN c.lease IS NOT NULL;
      IF q.window_seconds > 0 AND v_pushed + q.window_seconds * interval '1 second' > t THEN
        INSERT INTO mq_ready (partition, grp, at)
          VALUES (v_part, v_grp, v_pushed + q.window_seconds * interval '1 second');
        CONTINUE;
      END IF;
      -- A message that waited too long is not delivered, even if no sweep has found it yet.
      IF q.max_wait_seconds > 0 THEN
        v_most := v_most - mq_pop_abandon(c, q.max_wait_seconds, v_most, t);
        more := v_most <= 0;
        EXIT WHEN more;
        SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = v_part AND x.grp = v_grp;
      END IF;
      -- Due messages come first in the log, and so do those that fit. The first one always fits.
      SELECT array_agg(x.seq) AS seqs, array_agg(x.id) AS ids, array_agg(x.transaction_id) AS txs,
          array_agg(x.trace_id) AS traces, array_agg(x.sealed) AS sealed,
          string_agg(x.payload, E'\\x1e' ORDER BY x.seq) AS payloads,
          array_agg((extract(epoch FROM x.created_at) * 1000)::bigint) AS created,
          array_agg(coalesce((c.tries->>(x.seq::text))::int, 0)) AS tries, max(x.bytes) AS bytes
        INTO m FROM (
          SELECT y.*, sum(octet_length(y.payload)) OVER (ORDER BY y.seq) AS bytes,
            row_number() OVER (ORDER BY y.seq) AS n
          FROM (
            SELECT z.seq, z.id, z.transaction_id, z.trace_id, z.sealed, z.payload, z.created_at FROM mq_messages z
            WHERE z.partition = v_part AND z.seq > c.head AND (c.done = '{}' OR NOT z.seq = ANY (c.done))
              AND (z.grp IS NULL OR z.grp = v_grp)
            ORDER BY z.seq LIMIT CASE WHEN c.careful > c.head THEN 1 ELSE v_left END
          ) y WHERE q.delay_seconds = 0 OR y.created_at <= t - q.delay_seconds * interval '1 second'
        ) x WHERE x.bytes <= p_bytes - v_bytes OR x.n = 1 AND v_bytes = 0;
      IF m.seqs IS NULL THEN
        EXIT WHEN mq_pop_nothing(c, q.delay_seconds, v_at, v_bytes > 0, t);
        CONTINUE;
      END IF;
      -- The caller settles a sealed message after it could decrypt it.
      IF p_auto AND NOT true = ANY (m.sealed) THEN
        c.head := m.seqs[cardinality(m.seqs)];
        UPDATE mq_cursors x SET head = c.head, done = ARRAY(SELECT d FROM unnest(c.done) d WHERE d > c.head),
            tries = '{}', consumed = x.consumed + cardinality(m.seqs), moved_at = t
          WHERE x.partition = v_part AND x.grp = v_grp;
        PERFORM mq_requeue(v_part, v_grp, c.head, NULL);
      ELSE
        leased := true;
        UPDATE mq_cursors x SET lease = p_lease, batch = m.seqs, open = m.seqs
          WHERE x.partition = v_part AND x.grp = v_grp;
      END IF;
      parts := parts || v_part; names := names || v_name;
      ix := ix || array_fill(cardinality(parts), ARRAY[cardinality(m.seqs)]);
      ids := ids || m.ids; transactions := transactions || m.txs; traces := traces || m.traces;
      sealed := sealed || m.sealed; created_ms := created_ms || m.created; tries := tries || m.tries;
      payloads := CASE WHEN payloads = '' THEN m.payloads ELSE payloads || E'\\x1e' || m.payloads END;
      v_left := v_left - cardinality(m.seqs); v_bytes := v_bytes + m.bytes;
    END LOOP;
    -- Partitions that the group has not joined yet may have messages too: it continues to join, whatever it found.
    IF v_reached IS NOT NULL AND (p_partition IS NULL
        OR cardinality(parts) = 0 AND NOT mq_joined(q.id, p_partition, v_grp, v_reached)) THEN
      missing := ARRAY[q.id];
    END IF;
    IF cardinality(parts) > 0 THEN
      queue := q.name; namespace := q.namespace; task := q.task;
      -- Small payloads are bounded by their number.
      IF v_bytes > 65536 THEN
        PERFORM set_config('spillway.popped_bytes', (coalesce(v_flushed, 0) + v_bytes)::text, true);
      END IF;
      IF leased THEN
        INSERT INTO mq_leases (id, grp, until, partitions)
          VALUES (p_lease, v_grp, t + q.lease_seconds * interval '1 second', ARRAY(SELECT x.partition FROM mq_cursors x
            WHERE x.partition = ANY (parts) AND x.grp = v_grp AND x.lease = p_lease));
      END IF;
      RETURN;
    END IF;
    EXIT WHEN more;
    v_due := least(v_due, (SELECT x.at FROM mq_ready x WHERE x.grp = v_grp ORDER BY x.at LIMIT 1),
      (SELECT l.until FROM mq_leases l WHERE l.grp = v_grp ORDER BY l.until LIMIT 1));
  END LOOP;
  due_ms := ceil(extract(epoch FROM v_due - clock()) * 1000);
END $$;

-- Whether the group has joined this partition, in its slice or ahead of it.
CREATE OR REPLACE FUNCTION mq_joined(p_queue int, p_partition text, p_grp int, p_reached uuid) RETURNS boolean
  LANGUAGE sql STABLE AS $$
  SELECT EXISTS (SELECT FROM mq_partitions p LEFT JOIN mq_cursors x ON x.partition = p.id AND x.grp = p_grp
    WHERE p.queue = p_queue AND p.name = p_partition AND (p.id <= p_reached OR x.head IS NOT NULL))
$$;

-- Abandons messages of a partition that waited too long, at most p_most; returns how many. At p_most the pop ends, and
-- the partition is ready again.
CREATE OR REPLACE FUNCTION mq_pop_abandon(c mq_cursors, p_max_wait_seconds int, p_most int, t timestamptz) RETURNS int
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_old timestamptz := t - p_max_wait_seconds * interval '1 second'; v_n int;
BEGIN
  IF (v_old > (SELECT z.created_at FROM mq_messages z
      WHERE z.partition = c.partition AND z.seq > c.head ORDER BY z.seq LIMIT 1)) IS NOT TRUE THEN
    RETURN 0;
  END IF;
  v_n := mq_abandon(c.partition, c.grp, mq_before(c.partition, v_old), p_most);
  IF v_n >= p_most THEN INSERT INTO mq_ready (partition, grp, at) VALUES (c.partition, c.grp, t); END IF;
  RETURN v_n;
END $$;

-- No message of a partition was taken: one is due but does not fit (true), none is due, or there is none.
-- p_bounded: other messages have used the space. Makes the partition ready or idle.
CREATE OR REPLACE FUNCTION mq_pop_nothing(
  c mq_cursors, p_delay_seconds int, p_at timestamptz, p_bounded boolean, t timestamptz
) RETURNS boolean
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_first timestamptz; v_tail bigint;
BEGIN
  IF p_bounded AND (SELECT p_delay_seconds = 0 OR z.created_at <= t - p_delay_seconds * interval '1 second'
      FROM mq_messages z WHERE z.partition = c.partition AND z.seq > c.head AND NOT z.seq = ANY (c.done)
        AND (z.grp IS NULL OR z.grp = c.grp) ORDER BY z.seq LIMIT 1) THEN
    INSERT INTO mq_ready (partition, grp, at) VALUES (c.partition, c.grp, p_at);
    RETURN true;
  END IF;
  -- The lock keeps the tail from moving. Deleted messages are skipped.
  SELECT p.tail INTO v_tail FROM mq_partitions p WHERE p.id = c.partition FOR SHARE;
  SELECT z.created_at INTO v_first FROM mq_messages z
    WHERE z.partition = c.partition AND z.seq > c.head AND NOT z.seq = ANY (c.done) AND (z.grp IS NULL OR z.grp = c.grp)
    ORDER BY z.seq LIMIT 1;
  IF FOUND THEN
    INSERT INTO mq_ready (partition, grp, at)
      VALUES (c.partition, c.grp, greatest(t, v_first + p_delay_seconds * interval '1 second') + interval '1 ms');
  ELSE
    UPDATE mq_cursors x SET head = greatest(x.head, v_tail), done = '{}', tries = '{}'
      WHERE x.partition = c.partition AND x.grp = c.grp;
  END IF;
  RETURN false;
END $$;

-- Which of these queues and groups have something to read. Also ends expired deliveries.
CREATE OR REPLACE FUNCTION mq_due(p_queues text[], p_groups text[]) RETURNS TABLE (queue text, grp text)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  IF EXISTS (SELECT FROM mq_leases l WHERE l.until <= clock()) THEN PERFORM mq_expire(NULL, 1000); END IF;
  RETURN QUERY SELECT u.queue, u.grp
    FROM unnest(p_queues, p_groups) u(queue, grp) JOIN mq_queues q ON q.name = u.queue
    LEFT JOIN mq_groups g ON g.queue = q.id AND g.name = u.grp
    WHERE g.id IS NULL OR g.reached IS NOT NULL OR EXISTS (SELECT FROM mq_ready r
        WHERE r.grp = g.id AND r.at <= clock());
END $$;
`,
    },
    {
      name: 'push',
      sql: `-- The effect of a push (store/port.ts, StoreEffect): numbers and stores the messages, in the accepting transaction.
--
-- An item is the part of a request for one partition. Its messages are a flat list with the number of their item. The
-- result of an item is {"ids":[…], "duplicates":{"2":"id"}, "failed":{"0":"code"}}.
--
-- The steps have no settings: they run with those of mq_pushed.
CREATE OR REPLACE FUNCTION mq_pushed(
  p_verdicts text[], p_seqs bigint[], p_partitions uuid[], p_queues text[], p_names text[], p_item int[],
  p_ids uuid[], p_transactions text[], p_traces text[], p_sealed boolean[], p_payloads text, p_queued boolean
) RETURNS json[]
  LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET jit = off AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_payloads text[] := string_to_array(p_payloads, E'\\x1e');
  v_queue int[]; v_strict boolean; v_new boolean; v_failed text[]; v_dup uuid[]; v_inserted bigint;
  n record;
BEGIN
  IF NOT 'apply' = ANY (p_verdicts) THEN RETURN array_fill(NULL::json, ARRAY[cardinality(p_verdicts)]); END IF;
  -- Repeats until all are guarded: a queue that is deleted meanwhile is created again.
  LOOP
    SELECT array_agg(coalesce(q.id, mq_queue(u.name)) ORDER BY u.i),
        coalesce(bool_or(q.max_size > 0 OR q.encryption_enabled), false), bool_or(q.id IS NULL)
      INTO v_queue, v_strict, v_new
      FROM unnest(p_queues) WITH ORDINALITY u(name, i) LEFT JOIN mq_queues q ON q.name = u.name;
    EXIT WHEN mq_guard(v_queue, false);
  END LOOP;
  IF v_strict THEN
    v_failed := mq_push_check(p_verdicts, v_queue, p_partitions, p_item, p_transactions, p_sealed);
    -- A queued push has no caller to answer: the operation fails, and is retried or becomes a dead letter.
    IF p_queued AND (SELECT bool_or(f IS NOT NULL) FROM unnest(v_failed) f) THEN
      RAISE EXCEPTION '%', (SELECT f FROM unnest(v_failed) f WHERE f IS NOT NULL LIMIT 1) USING ERRCODE = 'SP001';
    END IF;
  END IF;
  n := mq_number(p_verdicts, p_partitions, v_queue, p_names, p_item, v_failed, t);
  -- Read under the lock, so times are in the order of the numbers. In whole milliseconds, as reported: a reader
  -- that starts at such a time gets the message.
  t := date_trunc('milliseconds', clock());
  v_inserted := mq_insert(p_verdicts, p_partitions, p_item, p_ids, p_transactions, p_traces, p_sealed, v_payloads,
    v_failed, v_dup, n.parts, n.tails, n.counts, t);
  -- Some exist already: repeats without them, so that the numbers have no gaps.
  IF v_inserted < n.expected THEN
    v_dup := mq_duplicates(p_verdicts, p_partitions, p_item, p_ids, p_transactions, v_failed, n.parts, n.tails,
      n.counts);
    n := mq_renumber(p_verdicts, p_partitions, p_item, v_failed, v_dup, n.parts, n.counts);
    v_inserted := mq_insert(p_verdicts, p_partitions, p_item, p_ids, p_transactions, p_traces, p_sealed, v_payloads,
      v_failed, v_dup, n.parts, n.tails, n.counts, t);
    IF v_inserted < n.expected THEN
      RAISE EXCEPTION 'stored % messages where % were expected', v_inserted, n.expected USING ERRCODE = 'XX000';
    END IF;
  END IF;
  -- Other processes are notified with the commit. While all groups have something to read, no pop waits.
  IF mq_push_ready(n.parts, n.tails, n.counts, n.owners, t) OR v_new THEN
    PERFORM mq_notify(ARRAY(SELECT DISTINCT q.name FROM mq_queues q WHERE q.id = ANY (n.owners)));
  END IF;
  RETURN mq_push_results(p_verdicts, p_item, p_ids, v_failed, v_dup);
END $$;

-- Messages that may not be stored: plain text in an encrypted queue, or more than the queue's size. A code per message,
-- or NULL.
CREATE OR REPLACE FUNCTION mq_push_check(
  p_verdicts text[], p_queue int[], p_partitions uuid[], p_item int[], p_transactions text[], p_sealed boolean[]
) RETURNS text[]
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_failed text[] := array_fill(NULL::text, ARRAY[cardinality(p_item)]);
  v_first bigint[]; v_left bigint; v_most bigint; v_asked bigint; r record;
BEGIN
  -- A message that exists already, or is in the request twice, takes no space: 0, or the number of the first.
  SELECT array_agg(CASE WHEN x.there THEN 0 ELSE x.first END ORDER BY x.k) INTO v_first FROM (
    SELECT u.k,
      first_value(u.k) OVER (
        PARTITION BY p_verdicts[u.item] = 'apply', p_partitions[u.item], u.tx ORDER BY u.k) AS first,
      EXISTS (SELECT FROM mq_messages m
        WHERE m.partition = p_partitions[u.item] AND m.transaction_id = u.tx AND m.grp IS NULL) AS there
    FROM unnest(p_item, p_transactions) WITH ORDINALITY u(item, tx, k)
  ) x;
  FOR r IN SELECT q.id, q.max_size, q.encryption_enabled FROM mq_queues q
      WHERE q.id = ANY (p_queue) AND (q.max_size > 0 OR q.encryption_enabled) ORDER BY q.id LOOP
    IF r.max_size > 0 THEN
      -- One queue at a time, in their order, after the lanes. Consumed messages make room, so the queue is counted only
      -- if the last count and the messages since leave none.
      SELECT q.size_most INTO v_most FROM mq_queues q WHERE q.id = r.id FOR NO KEY UPDATE;
      SELECT count(*) INTO v_asked FROM unnest(p_item, v_first) WITH ORDINALITY u(item, first, k)
        WHERE p_queue[u.item] = r.id AND u.first = u.k;
      IF v_most IS NULL OR v_most + v_asked > r.max_size THEN v_most := mq_size(r.id); END IF;
      v_left := r.max_size - v_most;
    END IF;
    FOR i IN 1 .. cardinality(p_item) LOOP
      CONTINUE WHEN p_queue[p_item[i]] <> r.id OR p_verdicts[p_item[i]] <> 'apply';
      IF r.encryption_enabled AND NOT p_sealed[i] THEN
        v_failed[i] := 'encryption_required';
      ELSIF r.max_size > 0 THEN
        CONTINUE WHEN v_first[i] = 0;
        IF v_first[i] < i THEN v_failed[i] := v_failed[v_first[i]];
        ELSIF v_left <= 0 THEN v_failed[i] := 'queue_full';
        ELSE v_left := v_left - 1; END IF;
      END IF;
    END LOOP;
    IF r.max_size > 0 THEN UPDATE mq_queues q SET size_most = r.max_size - v_left WHERE q.id = r.id; END IF;
  END LOOP;
  RETURN v_failed;
END $$;

-- Numbers the messages, under the locks of the partitions' rows, in the order of their ids.
CREATE OR REPLACE FUNCTION mq_number(
  p_verdicts text[], p_partitions uuid[], p_queue int[], p_names text[], p_item int[], p_failed text[],
  p_at timestamptz,
  OUT parts uuid[], OUT tails bigint[], OUT counts bigint[], OUT owners int[], OUT expected bigint
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  WITH n AS (
    SELECT p_partitions[u.item] AS part, min(u.item) AS item, count(*) AS n
    FROM unnest(p_item, p_failed) u(item, failed)
    WHERE p_verdicts[u.item] = 'apply' AND u.failed IS NULL GROUP BY 1 ORDER BY 1
  ), up AS (
    INSERT INTO mq_partitions AS p (id, queue, name, tail, pushed_at, created_at)
    SELECT n.part, p_queue[n.item], p_names[n.item], n.n, p_at, p_at FROM n
    ON CONFLICT (id) DO UPDATE SET tail = p.tail + excluded.tail, pushed_at = p_at
    RETURNING p.id, p.tail, p.queue
  )
  SELECT array_agg(up.id), array_agg(up.tail), array_agg(n.n), array_agg(up.queue), coalesce(sum(n.n), 0)
    INTO parts, tails, counts, owners, expected FROM up JOIN n ON n.part = up.id;
END $$;

-- Stores the messages that neither failed nor are known as duplicates; returns how many were new.
CREATE OR REPLACE FUNCTION mq_insert(
  p_verdicts text[], p_partitions uuid[], p_item int[], p_ids uuid[], p_transactions text[], p_traces text[],
  p_sealed boolean[], p_payloads text[], p_failed text[], p_dup uuid[], p_parts uuid[], p_tails bigint[],
  p_counts bigint[], p_at timestamptz
) RETURNS bigint
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_inserted bigint;
BEGIN
  INSERT INTO mq_messages (partition, seq, id, transaction_id, trace_id, sealed, payload, created_at)
    SELECT m.part, p.tail - p.n + m.rn, m.id, m.tx, m.trace, m.sealed, m.payload, p_at
    FROM (
      SELECT p_partitions[u.item] AS part, u.id, u.tx, u.trace, u.sealed, u.payload,
        row_number() OVER (PARTITION BY p_partitions[u.item] ORDER BY u.k) AS rn
      FROM unnest(p_item, p_ids, p_transactions, p_traces, p_sealed, p_payloads, p_failed, p_dup) WITH ORDINALITY
        u(item, id, tx, trace, sealed, payload, failed, dup, k)
      WHERE p_verdicts[u.item] = 'apply' AND u.failed IS NULL AND u.dup IS NULL
    ) m JOIN unnest(p_parts, p_tails, p_counts) p(id, tail, n) ON p.id = m.part
    ON CONFLICT (partition, transaction_id) WHERE grp IS NULL DO NOTHING;
  GET DIAGNOSTICS v_inserted = ROW_COUNT;
  RETURN v_inserted;
END $$;

-- Removes the rows of mq_insert again, and finds for each message the one that existed first, or NULL.
CREATE OR REPLACE FUNCTION mq_duplicates(
  p_verdicts text[], p_partitions uuid[], p_item int[], p_ids uuid[], p_transactions text[], p_failed text[],
  p_parts uuid[], p_tails bigint[], p_counts bigint[]
) RETURNS uuid[]
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_dup uuid[] := array_fill(NULL::uuid, ARRAY[cardinality(p_item)]);
  r record;
BEGIN
  DELETE FROM mq_messages m USING unnest(p_parts, p_tails, p_counts) p(id, tail, n)
    WHERE m.partition = p.id AND m.seq > p.tail - p.n;
  FOR r IN
    SELECT u.k, coalesce(m.id, first_value(u.id) OVER w) AS there, m.id IS NOT NULL OR row_number() OVER w > 1 AS dup
    FROM unnest(p_item, p_ids, p_transactions, p_failed) WITH ORDINALITY u(item, id, tx, failed, k)
      LEFT JOIN mq_messages m ON m.partition = p_partitions[u.item] AND m.transaction_id = u.tx AND m.grp IS NULL
    WHERE p_verdicts[u.item] = 'apply' AND u.failed IS NULL
    WINDOW w AS (PARTITION BY p_partitions[u.item], u.tx ORDER BY u.k)
  LOOP
    IF r.dup THEN v_dup[r.k] := r.there; END IF;
  END LOOP;
  RETURN v_dup;
END $$;

-- Numbers the messages again, without the duplicates. p_counts: how many numbers were assigned.
CREATE OR REPLACE FUNCTION mq_renumber(
  p_verdicts text[], p_partitions uuid[], p_item int[], p_failed text[], p_dup uuid[], p_parts uuid[],
  p_counts bigint[],
  OUT parts uuid[], OUT tails bigint[], OUT counts bigint[], OUT owners int[], OUT expected bigint
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  WITH n AS (
    SELECT p_partitions[u.item] AS part, count(*) FILTER (WHERE u.dup IS NULL) AS n
    FROM unnest(p_item, p_failed, p_dup) u(item, failed, dup)
    WHERE p_verdicts[u.item] = 'apply' AND u.failed IS NULL GROUP BY 1
  ), up AS (
    UPDATE mq_partitions p SET tail = p.tail - x.n + n.n
    FROM n JOIN unnest(p_parts, p_counts) x(id, n) ON x.id = n.part WHERE p.id = n.part
    RETURNING p.id, p.tail, n.n, p.queue
  )
  SELECT array_agg(up.id), array_agg(up.tail), array_agg(up.n), array_agg(up.queue), coalesce(sum(up.n), 0)
    INTO parts, tails, counts, owners, expected FROM up;
END $$;

-- Groups that had read everything have something to read; true if there are any. A separate statement, so that it sees
-- what was committed while the partition's lock was awaited.
CREATE OR REPLACE FUNCTION mq_push_ready(
  p_parts uuid[], p_tails bigint[], p_counts bigint[], p_owners int[], p_at timestamptz
) RETURNS boolean
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  INSERT INTO mq_ready (partition, grp, at, head)
    SELECT p.id, g.id, p_at + greatest(q.delay_seconds, q.window_seconds) * interval '1 second',
      CASE WHEN c.head IS NULL THEN p.tail - p.n END
    FROM unnest(p_parts, p_tails, p_counts, p_owners) p(id, tail, n, queue)
      JOIN mq_queues q ON q.id = p.queue JOIN mq_groups g ON g.queue = p.queue
      LEFT JOIN mq_cursors c ON c.partition = p.id AND c.grp = g.id
    WHERE p.n > 0 AND c.lease IS NULL AND CASE WHEN c.head IS NOT NULL THEN c.head >= p.tail - p.n
      ELSE p.id > g.reached IS NOT TRUE
        AND (SELECT x.grp FROM mq_ready x WHERE x.partition = p.id AND x.grp = g.id) IS NULL END
    ON CONFLICT (partition, grp) DO NOTHING;
  RETURN FOUND;
END $$;

CREATE OR REPLACE FUNCTION mq_push_results(
  p_verdicts text[], p_item int[], p_ids uuid[], p_failed text[], p_dup uuid[]
) RETURNS json[]
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  RETURN (SELECT array_agg(CASE WHEN p_verdicts[i.i] = 'apply' THEN x.result END ORDER BY i.i)
    FROM generate_series(1, cardinality(p_verdicts)) i(i) LEFT JOIN (
      SELECT m.item, json_build_object('ids', json_agg(coalesce(m.dup, m.id) ORDER BY m.k),
        'duplicates', json_object_agg(m.n, m.dup) FILTER (WHERE m.dup IS NOT NULL),
        'failed', json_object_agg(m.n, m.failed) FILTER (WHERE m.failed IS NOT NULL)) AS result
      FROM (
        SELECT u.item, u.id, u.failed, u.dup, u.k, row_number() OVER (PARTITION BY u.item ORDER BY u.k) - 1 AS n
        FROM unnest(p_item, p_ids, p_failed, p_dup) WITH ORDINALITY u(item, id, failed, dup, k)
      ) m GROUP BY m.item
    ) x ON x.item = i.i);
END $$;
`,
    },
    {
      name: 'queues',
      sql: `-- Queues: create on first use, guard against concurrent subscription and deletion, size, wake-up.

-- Creating or ending a group, or deleting the queue, waits for pushes to the queue, and pushes wait for it: no push
-- can miss a group. False: one of the queues was deleted before it was guarded.
CREATE OR REPLACE FUNCTION mq_guard(p_queues int[], p_exclusive boolean) RETURNS boolean
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
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

CREATE OR REPLACE FUNCTION mq_queue(p_name text) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_id int;
BEGIN
  -- Another transaction may create it, or delete it, between the two.
  LOOP
    SELECT q.id INTO v_id FROM mq_queues q WHERE q.name = p_name;
    IF FOUND THEN RETURN v_id; END IF;
    INSERT INTO mq_queues (name, created_at) VALUES (p_name, clock()) ON CONFLICT (name) DO NOTHING RETURNING id
      INTO v_id;
    IF FOUND THEN RETURN v_id; END IF;
  END LOOP;
END $$;

-- How many messages behind a number were deleted one by one; p_done: those among them that do not count.
CREATE OR REPLACE FUNCTION mq_holes(p_holes bigint[], p_behind bigint, p_done bigint[]) RETURNS bigint
  LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN p_holes = '{}' THEN 0
    ELSE (SELECT count(*) FROM unnest(p_holes) h WHERE h > p_behind AND NOT h = ANY (p_done)) END
$$;

-- Messages that a queue holds: those that its slowest group has not read yet; all, if it has no group.
CREATE OR REPLACE FUNCTION mq_size(p_queue int) RETURNS bigint
  LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT coalesce(sum(p.tail - b.behind - mq_holes(p.holes, b.behind, '{}')), 0)::bigint
    FROM mq_partitions p CROSS JOIN LATERAL (
    SELECT greatest(p.low, mq_slowest(p_queue, p.id, p.low, p.tail)) AS behind
  ) b WHERE p.queue = p_queue
$$;

-- Wakes waiting pops of these queues, by hashes of their names: a notification has room for 8,000 bytes.
CREATE OR REPLACE FUNCTION mq_notify(p_queues text[]) RETURNS void
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT pg_notify('spillway_' || current_schema(), 'mq:' || CASE WHEN cardinality(p_queues) > 500 THEN '*'
      ELSE (SELECT string_agg(left(md5(n), 8), ',') FROM unnest(p_queues) n) END)
$$;
`,
    },
    {
      name: 'remove',
      sql: `-- Deletions by operators: all messages of a queue, a queue, a single message.

-- Empties a queue, or one of its partitions: every group moves to the end. Dead letters stay.
CREATE OR REPLACE FUNCTION mq_clear(p_queue text, p_partition text) RETURNS bigint
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_n bigint := 0; v_gone bigint; v_tail bigint; r record; v_leases uuid[] := '{}'; v_parts uuid[] := '{}';
BEGIN
  -- No group joins meanwhile.
  PERFORM mq_guard(ARRAY(SELECT q.id FROM mq_queues q WHERE q.name = p_queue), false);
  FOR r IN SELECT p.id FROM mq_partitions p JOIN mq_queues q ON q.id = p.queue
    WHERE q.name = p_queue AND (p_partition IS NULL OR p.name = p_partition) ORDER BY p.id LOOP
    -- Locks the cursors of groups that may pop at this moment; the others move to the end, or start behind it.
    INSERT INTO mq_cursors (partition, grp, head) SELECT r.id, x.grp, 0 FROM mq_ready x WHERE x.partition = r.id
      ORDER BY x.grp ON CONFLICT (partition, grp) DO NOTHING;
    PERFORM FROM mq_cursors c WHERE c.partition = r.id ORDER BY c.grp FOR UPDATE;
    SELECT v_leases || coalesce(array_agg(c.lease), '{}'), v_parts || coalesce(array_agg(r.id), '{}')
      INTO v_leases, v_parts FROM mq_cursors c WHERE c.partition = r.id AND c.lease IS NOT NULL;
    UPDATE mq_partitions p SET low = p.tail, holes = '{}', mark = p.tail WHERE p.id = r.id RETURNING p.tail INTO v_tail;
    DELETE FROM mq_messages m WHERE m.partition = r.id;
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    v_n := v_n + v_gone;
    UPDATE mq_cursors c
      SET head = v_tail, done = '{}', lease = NULL, batch = '{}', open = '{}', tries = '{}', careful = 0,
        not_before = NULL, moved_at = clock() WHERE c.partition = r.id;
    DELETE FROM mq_ready x WHERE x.partition = r.id;
  END LOOP;
  PERFORM mq_unlease(v_leases, v_parts);
  RETURN v_n;
END $$;

CREATE OR REPLACE FUNCTION mq_drop(p_queue text) RETURNS boolean
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_queue int;
BEGIN
  -- From here on by its id: a new queue with this name is another queue.
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

-- Removes a single message from the log. A consumer that has leased it gets "unknown" for its ack.
CREATE OR REPLACE FUNCTION mq_remove(p_partition uuid, p_transaction text) RETURNS boolean
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_seqs bigint[]; v_low bigint; c record; v_leases uuid[] := '{}'; v_parts uuid[] := '{}';
BEGIN
  -- In the common lock order: no pop delivers it meanwhile, and no push runs.
  PERFORM FROM mq_cursors x WHERE x.partition = p_partition ORDER BY x.grp FOR UPDATE;
  PERFORM FROM mq_partitions p WHERE p.id = p_partition FOR NO KEY UPDATE;
  WITH gone AS (DELETE FROM mq_messages m
      WHERE m.partition = p_partition AND m.transaction_id = p_transaction AND m.grp IS NULL RETURNING m.seq),
    gone_too AS (DELETE FROM mq_messages m
        WHERE m.partition = p_partition AND m.transaction_id = p_transaction AND m.grp IS NOT NULL RETURNING m.seq)
  SELECT array_agg(x.seq) INTO v_seqs FROM (SELECT seq FROM gone UNION ALL SELECT seq FROM gone_too) x;
  IF v_seqs IS NULL THEN RETURN false; END IF;
  SELECT coalesce((SELECT m.seq - 1 FROM mq_messages m WHERE m.partition = p_partition AND m.seq > p.low
        ORDER BY m.seq LIMIT 1), p.tail) INTO v_low FROM mq_partitions p WHERE p.id = p_partition;
  UPDATE mq_partitions p SET low = v_low, holes = ARRAY(SELECT h FROM unnest(p.holes || v_seqs) h WHERE h > v_low)
    WHERE p.id = p_partition;
  FOR c IN SELECT x.grp, x.open FROM mq_cursors x WHERE x.partition = p_partition AND x.open && v_seqs
    ORDER BY x.grp LOOP
    UPDATE mq_cursors x
      SET open = ARRAY(SELECT o FROM unnest(x.open) o WHERE NOT o = ANY (v_seqs)), done = x.done || ARRAY(SELECT o
          FROM unnest(x.open) o WHERE o = ANY (v_seqs))
      WHERE x.partition = p_partition AND x.grp = c.grp;
    IF c.open <@ v_seqs THEN
      v_leases := v_leases || mq_end(p_partition, c.grp);
      v_parts := v_parts || p_partition;
    END IF;
  END LOOP;
  PERFORM mq_unlease(v_leases, v_parts);
  RETURN true;
END $$;
`,
    },
    {
      name: 'replay',
      sql: `-- Puts a dead letter back into its partition.

-- A dead letter returns to the end of its partition, only for the group that abandoned it.
CREATE OR REPLACE FUNCTION mq_replay(
  p_id uuid
) RETURNS TABLE (queue text, partition uuid, message_id uuid, transaction_id text)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  d mq_dead; v_grp int; v_tail bigint; v_queue int;
BEGIN
  SELECT x.* INTO d FROM mq_dead x WHERE x.id = p_id FOR UPDATE;
  IF NOT FOUND THEN RETURN; END IF;
  -- Repeats until both are guarded: a queue that is deleted meanwhile is created again.
  LOOP
    v_queue := mq_queue(d.queue);
    PERFORM mq_guard(ARRAY[v_queue], false);
    SELECT g.id INTO v_grp FROM mq_groups g WHERE g.queue = v_queue AND g.name = d.grp;
    IF NOT FOUND THEN v_grp := mq_subscribe(v_queue, d.grp, 'all', NULL); END IF;
    EXIT WHEN v_grp IS NOT NULL;
  END LOOP;
  INSERT INTO mq_partitions AS p (id, queue, name, tail, pushed_at, created_at)
    VALUES (d.partition, v_queue, d.partition_name, 1, clock(), clock())
    ON CONFLICT (id) DO UPDATE SET tail = p.tail + 1, pushed_at = clock() RETURNING p.tail INTO v_tail;
  INSERT INTO mq_messages (partition, seq, id, transaction_id, trace_id, grp, sealed, payload, created_at)
    VALUES (d.partition, v_tail, d.message_id, d.transaction_id, d.trace_id, v_grp, d.sealed, d.payload,
        date_trunc('milliseconds', clock()));
  DELETE FROM mq_dead x WHERE x.id = p_id;
  UPDATE mq_queues q SET size_most = q.size_most + 1 WHERE q.id = v_queue AND q.size_most IS NOT NULL;
  -- As a push does.
  INSERT INTO mq_ready (partition, grp, at, head)
    SELECT d.partition, g.id, clock(), CASE WHEN c.head IS NULL THEN v_tail - 1 END
    FROM mq_groups g LEFT JOIN mq_cursors c ON c.partition = d.partition AND c.grp = g.id
    WHERE g.queue = v_queue AND c.lease IS NULL AND CASE WHEN c.head IS NOT NULL THEN c.head >= v_tail - 1
      ELSE d.partition > g.reached IS NOT TRUE AND (SELECT x.grp FROM mq_ready x
          WHERE x.partition = d.partition AND x.grp = g.id) IS NULL END
    ON CONFLICT (partition, grp) DO NOTHING;
  PERFORM mq_notify(ARRAY[d.queue]);
  queue := d.queue; partition := d.partition; message_id := d.message_id; transaction_id := d.transaction_id;
  RETURN NEXT;
END $$;
`,
    },
    {
      name: 'seek',
      sql: `-- Moves a consumer group to another position.

-- Moves a group to p_to (start, end, or a time) in the next p_partitions partitions of a queue after p_after.
-- Its leases are lost. moved NULL: there is no such queue or group.
CREATE OR REPLACE FUNCTION mq_seek(
  p_queue text, p_group text, p_to text, p_at timestamptz, p_after uuid, p_partitions int,
  OUT moved bigint, OUT last uuid
)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_queue int; v_grp int; r record; v_head bigint; v_lease uuid; v_leases uuid[] := '{}'; v_parts uuid[] := '{}';
BEGIN
  SELECT q.id, g.id INTO v_queue, v_grp FROM mq_queues q JOIN mq_groups g ON g.queue = q.id
    WHERE q.name = p_queue AND g.name = p_group;
  -- No group joins meanwhile.
  IF NOT FOUND OR NOT mq_guard(ARRAY[v_queue], false) THEN RETURN; END IF;
  UPDATE mq_queues q SET size_most = NULL WHERE q.id = v_queue AND q.size_most IS NOT NULL;
  moved := 0;
  FOR r IN SELECT p.id, p.tail, p.low FROM mq_partitions p
    WHERE p.queue = v_queue AND (p_after IS NULL OR p.id > p_after) ORDER BY p.id LIMIT p_partitions LOOP
    INSERT INTO mq_cursors AS x (partition, grp, head) VALUES (r.id, v_grp, 0)
      ON CONFLICT (partition, grp) DO UPDATE SET head = x.head RETURNING x.lease INTO v_lease;
    IF v_lease IS NOT NULL THEN v_leases := v_leases || v_lease; v_parts := v_parts || r.id; END IF;
    v_head := CASE p_to WHEN 'start' THEN r.low WHEN 'end' THEN r.tail ELSE mq_before(r.id, p_at) END;
    UPDATE mq_cursors x
      SET head = v_head, done = '{}', lease = NULL, batch = '{}', open = '{}', tries = '{}', careful = 0,
        not_before = NULL, moved_at = clock() WHERE x.partition = r.id AND x.grp = v_grp;
    DELETE FROM mq_ready d WHERE d.partition = r.id AND d.grp = v_grp;
    PERFORM mq_requeue(r.id, v_grp, v_head, NULL);
    moved := moved + 1; last := r.id;
  END LOOP;
  PERFORM mq_unlease(v_leases, v_parts);
END $$;
`,
    },
    {
      name: 'sweep',
      sql: `-- Retention: deletes from the log what was kept long enough.

-- Deletes from the log, up to a number, the oldest p_most.
CREATE OR REPLACE FUNCTION mq_cut(p_partition uuid, p_upto bigint, p_most int) RETURNS bigint
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_low bigint; v_upto bigint; v_n bigint;
BEGIN
  SELECT least(p_upto, p.tail), p.low INTO v_upto, v_low FROM mq_partitions p WHERE p.id = p_partition
    FOR NO KEY UPDATE;
  IF v_upto IS NULL OR v_upto <= v_low THEN RETURN 0; END IF;
  SELECT coalesce(max(x.seq) FILTER (WHERE x.n = p_most), v_upto) INTO v_upto
    FROM (SELECT m.seq, row_number() OVER (ORDER BY m.seq) AS n FROM mq_messages m
        WHERE m.partition = p_partition AND m.seq <= v_upto ORDER BY m.seq LIMIT p_most) x;
  DELETE FROM mq_messages m WHERE m.partition = p_partition AND m.seq <= v_upto;
  GET DIAGNOSTICS v_n = ROW_COUNT;
  UPDATE mq_partitions p
    SET low = v_upto, holes = CASE WHEN p.holes = '{}' THEN p.holes
      ELSE ARRAY(SELECT h FROM unnest(p.holes) h WHERE h > v_upto) END WHERE p.id = p_partition;
  RETURN v_n;
END $$;

-- Removes expired messages. Consumed by every group: after completed_retention_seconds, which
-- is exact to the time between two sweeps. Unconsumed: only if the queue says so (retention_seconds,
-- max_wait_seconds).
-- The next p_partitions after p_after, and the last of them: a sweep is many short transactions.
CREATE OR REPLACE FUNCTION mq_sweep(
  p_most int, p_after uuid, p_partitions int,
  OUT removed bigint, OUT given_up bigint, OUT traces bigint, OUT last uuid
)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  r record; c record; v_min bigint; v_upto bigint; v_gone bigint;
BEGIN
  removed := 0; given_up := 0;
  FOR r IN
    SELECT p.id, p.queue, p.low, p.tail, p.mark, p.marked_at, q.retention_enabled, q.retention_seconds,
      q.completed_retention_seconds, q.max_wait_seconds
           FROM mq_queues q JOIN mq_partitions p ON p.queue = q.id
           WHERE (q.retention_enabled OR q.max_wait_seconds > 0) AND p.low < p.tail
             AND (p_after IS NULL OR p.id > p_after)
           ORDER BY p.id LIMIT p_partitions LOOP
    EXIT WHEN removed >= p_most OR given_up >= p_most;
    last := r.id;
    -- If a group joins at this moment, the next round abandons the messages that waited too long.
    IF r.max_wait_seconds > 0
      AND pg_try_advisory_xact_lock_shared(hashtext('spillway.groups.' || current_schema()), r.queue) THEN
      v_upto := mq_before(r.id, t - r.max_wait_seconds * interval '1 second');
      INSERT INTO mq_cursors (partition, grp, head) SELECT r.id, g.id, h.head
        FROM mq_groups g LEFT JOIN mq_cursors x ON x.partition = r.id AND x.grp = g.id
        LEFT JOIN mq_ready y ON y.partition = r.id AND y.grp = g.id
          CROSS JOIN LATERAL (SELECT coalesce(y.head, CASE WHEN r.id > g.reached THEN mq_start(r.id, r.low, g.starts)
                ELSE r.tail END) AS head) h
        WHERE g.queue = r.queue AND v_upto > r.low AND x.head IS NULL AND h.head < v_upto ORDER BY g.id
        ON CONFLICT (partition, grp) DO NOTHING;
      FOR c IN SELECT x.grp FROM mq_cursors x WHERE x.partition = r.id AND x.head < v_upto AND x.lease IS NULL
        ORDER BY x.grp FOR UPDATE SKIP LOCKED LOOP
        given_up := given_up + mq_abandon(r.id, c.grp, v_upto, p_most);
        DELETE FROM mq_ready d WHERE d.partition = r.id AND d.grp = c.grp;
        PERFORM mq_requeue(x.partition, x.grp, x.head, NULL) FROM mq_cursors x
          WHERE x.partition = r.id AND x.grp = c.grp;
      END LOOP;
    END IF;
    CONTINUE WHEN NOT r.retention_enabled;
    IF r.retention_seconds > 0 THEN
      removed := removed + mq_cut(r.id, mq_before(r.id, t - r.retention_seconds * interval '1 second'), p_most);
    END IF;
    v_min := mq_slowest(r.queue, r.id, r.low, r.tail);
    IF r.completed_retention_seconds = 0 THEN
      IF v_min > r.low THEN removed := removed + mq_cut(r.id, v_min, p_most); END IF;
    ELSIF r.marked_at IS NULL OR r.marked_at <= t - r.completed_retention_seconds * interval '1 second' THEN
      IF r.marked_at IS NOT NULL AND r.mark > r.low THEN
        v_gone := mq_cut(r.id, r.mark, p_most);
        removed := removed + v_gone;
        -- More are left: the mark stays until they are removed.
        CONTINUE WHEN v_gone >= p_most;
      END IF;
      UPDATE mq_partitions p SET mark = greatest(p.mark, coalesce(v_min, 0)), marked_at = t
        WHERE p.id = r.id AND coalesce(v_min, 0) > p.low;
    END IF;
  END LOOP;
  WITH old AS (DELETE FROM mq_traces x
      WHERE x.id IN (SELECT y.id FROM (SELECT z.id, z.created_at FROM mq_traces z ORDER BY z.id LIMIT p_most) y
          WHERE y.created_at < t - interval '30 days') RETURNING 1) SELECT count(*) INTO traces FROM old;
END $$;
`,
    },
  ],
}
