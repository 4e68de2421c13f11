-- Pop takes partitions that are ready, the longest ready first, one after the other.
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
          string_agg(x.payload, E'\x1e' ORDER BY x.seq) AS payloads,
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
      payloads := CASE WHEN payloads = '' THEN m.payloads ELSE payloads || E'\x1e' || m.payloads END;
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
