/**
 * Consuming messages: pop, ack, expiry, retention, seek. The states and locks are told at the head of 0007.
 *
 * Pop takes partitions that are ready, the longest ready first, one after the other. Whatever ends a delivery (the last ack,
 * expiry, seek) comes to \`mq_end\`, which moves the cursor and says whether there is more.
 */
export const consuming = {
  version: 8,
  name: 'consuming',
  sql: `
-- Puts a cursor without lease where it belongs: ready, or idle. The caller holds its lock and has written its head.
CREATE FUNCTION mq_requeue(p_partition uuid, p_grp int, p_head bigint, p_not_before timestamptz) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_tail bigint; v_pushed timestamptz; v_queue int; v_at timestamptz; q record;
BEGIN
  SELECT p.tail, p.pushed_at, p.queue INTO v_tail, v_pushed, v_queue FROM mq_partitions p WHERE p.id = p_partition;
  IF p_head >= v_tail THEN
    -- Whoever pushes at this moment still sees the lease and leaves it to us.
    SELECT p.tail, p.pushed_at, p.queue INTO v_tail, v_pushed, v_queue FROM mq_partitions p WHERE p.id = p_partition FOR SHARE;
  END IF;
  IF v_tail IS NULL OR p_head >= v_tail THEN RETURN; END IF;
  SELECT x.delay_seconds, x.window_seconds INTO q FROM mq_queues x WHERE x.id = v_queue;
  v_at := greatest(clock(), p_not_before);
  IF q.window_seconds > 0 THEN v_at := greatest(v_at, v_pushed + q.window_seconds * interval '1 second'); END IF;
  IF q.delay_seconds > 0 THEN
    v_at := greatest(v_at, (SELECT m.created_at FROM mq_messages m WHERE m.partition = p_partition AND m.seq > p_head ORDER BY m.seq LIMIT 1) + q.delay_seconds * interval '1 second');
  END IF;
  INSERT INTO mq_ready (partition, grp, at) VALUES (p_partition, p_grp, v_at) ON CONFLICT (partition, grp) DO UPDATE SET at = excluded.at;
END $$;

-- A delivery has ended: nothing of it is open any more. The caller holds the cursor's lock, and has \`mq_unlease\` to call for
-- the lease when it is through with all cursors.
-- p_done: settled just now, by consumers.
CREATE FUNCTION mq_end(p_partition uuid, p_grp int, p_done bigint[] DEFAULT '{}') RETURNS uuid LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  c mq_cursors; v_head bigint; v_done bigint[];
BEGIN
  SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = p_partition AND x.grp = p_grp;
  v_done := c.done || p_done;
  -- Mostly all of it is settled at once.
  IF cardinality(p_done) < cardinality(c.batch) THEN
    SELECT min(x.seq) - 1 INTO v_head FROM (SELECT unnest(c.batch) EXCEPT SELECT unnest(v_done)) x(seq);
  END IF;
  v_head := greatest(c.head, coalesce(v_head, (SELECT max(x.seq) FROM unnest(c.batch) x(seq))));
  UPDATE mq_cursors x SET lease = NULL, batch = '{}', open = '{}', head = v_head,
      done = CASE WHEN c.done = '{}' AND cardinality(p_done) = cardinality(c.batch) THEN '{}'
        ELSE ARRAY(SELECT d FROM unnest(v_done) d WHERE d > v_head) END,
      tries = CASE WHEN c.tries = '{}' THEN c.tries ELSE coalesce((SELECT jsonb_object_agg(e.key, e.value) FROM jsonb_each(c.tries) e WHERE e.key::bigint > v_head), '{}') END,
      not_before = NULL, consumed = x.consumed + cardinality(p_done), moved_at = CASE WHEN p_done = '{}' THEN x.moved_at ELSE clock() END
    WHERE x.partition = p_partition AND x.grp = p_grp;
  PERFORM mq_requeue(p_partition, p_grp, v_head, c.not_before);
  RETURN c.lease;
END $$;

-- Takes partitions out of leases; one that has none left is over. In the order of their ids: acks of several partitions of one
-- lease would wait for each other else.
CREATE FUNCTION mq_unlease(p_leases uuid[], p_partitions uuid[]) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  IF cardinality(p_leases) = 0 THEN RETURN; END IF;
  -- Mostly it is one lease with one partition.
  DELETE FROM mq_leases l WHERE cardinality(p_leases) = 1 AND l.id = p_leases[1] AND l.partitions <@ p_partitions;
  IF FOUND THEN RETURN; END IF;
  PERFORM FROM mq_leases l WHERE l.id = ANY (p_leases) ORDER BY l.id FOR UPDATE;
  UPDATE mq_leases l SET partitions = ARRAY(SELECT p FROM unnest(l.partitions) p WHERE NOT p = ANY (u.parts))
    FROM (SELECT x.lease, array_agg(x.part) AS parts FROM unnest(p_leases, p_partitions) x(lease, part) GROUP BY x.lease) u WHERE l.id = u.lease;
  DELETE FROM mq_leases l WHERE l.id = ANY (p_leases) AND l.partitions = '{}';
END $$;

-- Keeps what a group gives up: as a dead letter where the queue has those, else as the record that it was skipped.
CREATE FUNCTION mq_bury(p_partition uuid, p_grp int, p_seqs bigint[], p_errors text[], p_tries jsonb, p_letter boolean) RETURNS void LANGUAGE sql SET search_path FROM CURRENT AS $$
  INSERT INTO mq_dead (message_id, partition, seq, queue, partition_name, namespace, task, grp, transaction_id, trace_id, sealed, payload, error, retry_count, is_letter, created_at, moved_at)
  SELECT m.id, m.partition, m.seq, q.name, p.name, q.namespace, q.task, g.name, m.transaction_id, m.trace_id, m.sealed, m.payload, u.error,
    coalesce((p_tries->>(m.seq::text))::int, 0), p_letter OR q.dead_letter_queue OR q.dlq_after_max_retries, m.created_at, clock()
  FROM unnest(p_seqs, p_errors) u(seq, error) JOIN mq_messages m ON m.partition = p_partition AND m.seq = u.seq
    JOIN mq_partitions p ON p.id = m.partition JOIN mq_queues q ON q.id = p.queue JOIN mq_groups g ON g.id = p_grp
$$;

-- What a group has not read in time is given up, up to a number, the oldest p_most; tells how many. The caller holds the lock of
-- the cursor, which has no lease.
CREATE FUNCTION mq_give_up(p_partition uuid, p_grp int, p_upto bigint, p_most int) RETURNS bigint LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  c mq_cursors; v_head bigint; v_seqs bigint[];
BEGIN
  SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = p_partition AND x.grp = p_grp;
  v_seqs := ARRAY(SELECT m.seq FROM mq_messages m WHERE m.partition = p_partition AND m.seq > c.head AND m.seq <= p_upto AND NOT m.seq = ANY (c.done) AND (m.grp IS NULL OR m.grp = p_grp) ORDER BY m.seq LIMIT p_most);
  -- Not all of it: the rest is for whoever comes next.
  v_head := CASE WHEN cardinality(v_seqs) = p_most THEN v_seqs[p_most] ELSE greatest(c.head, p_upto) END;
  PERFORM mq_bury(p_partition, p_grp, v_seqs, array_fill('It waited longer than maxWaitTimeSeconds.'::text, ARRAY[cardinality(v_seqs)]), c.tries, false);
  UPDATE mq_cursors x SET head = v_head, done = ARRAY(SELECT d FROM unnest(x.done) d WHERE d > v_head) WHERE x.partition = p_partition AND x.grp = p_grp;
  RETURN cardinality(v_seqs);
END $$;

-- Deliveries whose time is over. Every open message was delivered in vain; one that was delivered alone and has used up its
-- tries is given up, the others are delivered one by one from now on.
CREATE FUNCTION mq_expire(p_grp int, p_most int) RETURNS int LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  r record; c mq_cursors; v_limit int; v_tries jsonb; v_leases uuid[] := '{}'; v_parts uuid[] := '{}';
BEGIN
  FOR r IN
    SELECT l.id, l.grp, u.partition FROM (SELECT x.* FROM mq_leases x WHERE x.until <= t AND (p_grp IS NULL OR x.grp = p_grp) ORDER BY x.until LIMIT p_most) l, unnest(l.partitions) u(partition)
    ORDER BY u.partition, l.grp
  LOOP
    SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = r.partition AND x.grp = r.grp AND x.lease = r.id FOR UPDATE SKIP LOCKED;
    CONTINUE WHEN NOT FOUND OR NOT EXISTS (SELECT FROM mq_leases l WHERE l.id = r.id AND l.until <= t);
    v_tries := c.tries || coalesce((SELECT jsonb_object_agg(o::text, coalesce((c.tries->>(o::text))::int, 0) + 1) FROM unnest(c.open) o), '{}');
    SELECT q.retry_limit INTO v_limit FROM mq_partitions p JOIN mq_queues q ON q.id = p.queue WHERE p.id = r.partition;
    IF cardinality(c.batch) = 1 AND cardinality(c.open) = 1 AND (v_tries->>(c.open[1]::text))::int > v_limit THEN
      PERFORM mq_bury(r.partition, r.grp, c.open, ARRAY['The lease expired ' || (v_limit + 1) || ' times.'], v_tries, false);
      c.done := c.done || c.open;
    END IF;
    UPDATE mq_cursors x SET tries = v_tries, done = c.done, careful = CASE WHEN cardinality(c.batch) > 1 THEN (SELECT max(b) FROM unnest(c.batch) b) ELSE x.careful END
      WHERE x.partition = r.partition AND x.grp = r.grp;
    v_leases := v_leases || mq_end(r.partition, r.grp); v_parts := v_parts || r.partition;
  END LOOP;
  PERFORM mq_unlease(v_leases, v_parts);
  -- Of a queue or group that is gone: no cursor names it any more.
  DELETE FROM mq_leases l WHERE l.until <= t AND (p_grp IS NULL OR l.grp = p_grp) AND NOT EXISTS (SELECT FROM mq_cursors c WHERE c.lease = l.id AND c.partition = ANY (l.partitions) AND c.grp = l.grp);
  RETURN cardinality(v_parts);
END $$;

-- Takes up to p_batch messages of up to p_partitions partitions of the first queue that has some, under one lease; they end at
-- p_bytes of payload, as they are stored, but there is always one. What has no room is not taken: its partition keeps its turn. One row
-- with a list for each column; payloads stand between record separators. due_ms: when there may be something, if there is
-- nothing now. p_partition: of this one alone. leased: some of it has to be answered for. more: a thousand were given up and it is to
-- be popped again. missing: queues in which the group has yet to begin or to join partitions: the caller has \`mq_subscribe\` to call, each in a
-- statement of its own, and to pop again if it got nothing. The guard that it takes must not be held together with anything that others wait for.
-- Many pops are made by one statement, whose answer has to be bounded too: those behind p_flush bytes take nothing, and say more.
-- What the pops of a transaction have taken is kept in a setting of that transaction.
CREATE FUNCTION mq_pop(
  p_queue text, p_namespace text, p_task text, p_partition text, p_group text, p_batch int, p_partitions int, p_auto boolean, p_lease uuid, p_mode text, p_from timestamptz, p_bytes int, p_flush int,
  OUT queue text, OUT namespace text, OUT task text, OUT parts uuid[], OUT names text[], OUT ix int[], OUT ids uuid[], OUT transactions text[], OUT traces text[], OUT sealed boolean[],
  OUT payloads text, OUT created_ms bigint[], OUT tries int[], OUT due_ms bigint, OUT leased boolean, OUT more boolean, OUT missing int[]
) LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET jit = off
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  q mq_queues; c mq_cursors; v_grp int; v_part uuid; v_name text; v_pushed timestamptz; v_left int; v_limit int; v_tail bigint;
  m record; v_due timestamptz; v_first timestamptz; v_old timestamptz; v_most int := 1000; v_reached uuid; v_head bigint; v_at timestamptz; v_bytes bigint := 0;
  v_flushed bigint := nullif(current_setting('spillway.popped_bytes', true), '');
BEGIN
  ix := '{}'; payloads := ''; more := v_flushed >= p_flush;
  IF more THEN RETURN; END IF;
  more := false;
  IF p_queue IS NOT NULL AND p_mode <> 'all' THEN PERFORM mq_queue(p_queue); END IF;
  FOR q IN SELECT x.* FROM mq_queues x WHERE CASE WHEN p_queue IS NOT NULL THEN x.name = p_queue
      ELSE (p_namespace IS NULL OR x.namespace = p_namespace) AND (p_task IS NULL OR x.task = p_task) END ORDER BY x.priority DESC, x.name LOOP
    SELECT g.id, g.reached INTO v_grp, v_reached FROM mq_groups g WHERE g.queue = q.id AND g.name = p_group;
    IF NOT FOUND THEN
      missing := missing || q.id;
    END IF;
    -- Not past one of higher priority, of which nobody knows yet what it has.
    CONTINUE WHEN missing IS NOT NULL;
    IF EXISTS (SELECT FROM mq_leases l WHERE l.grp = v_grp AND l.until <= t) THEN
      PERFORM mq_expire(v_grp, 100);
      t := clock();
    END IF;
    v_left := p_batch; parts := '{}'; names := '{}'; leased := false;
    LOOP
      EXIT WHEN v_left <= 0 OR cardinality(parts) >= p_partitions OR v_bytes >= p_bytes;
      IF p_partition IS NULL THEN
        DELETE FROM mq_ready r WHERE r.ctid = (SELECT x.ctid FROM mq_ready x WHERE x.grp = v_grp AND x.at <= t ORDER BY x.at LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING r.partition, r.at, r.head INTO v_part, v_at, v_head;
      ELSE
        EXIT WHEN cardinality(parts) > 0;
        DELETE FROM mq_ready r WHERE r.ctid = (SELECT x.ctid FROM mq_partitions p JOIN mq_ready x ON x.partition = p.id AND x.grp = v_grp AND x.at <= t
          WHERE p.queue = q.id AND p.name = p_partition FOR UPDATE OF x SKIP LOCKED) RETURNING r.partition, r.at, r.head INTO v_part, v_at, v_head;
      END IF;
      EXIT WHEN v_part IS NULL;
      SELECT p.name, p.pushed_at INTO v_name, v_pushed FROM mq_partitions p WHERE p.id = v_part;
      SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = v_part AND x.grp = v_grp FOR UPDATE;
      IF NOT FOUND THEN
        INSERT INTO mq_cursors (partition, grp, head) VALUES (v_part, v_grp, coalesce(v_head, 0)) ON CONFLICT (partition, grp) DO NOTHING;
        SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = v_part AND x.grp = v_grp FOR UPDATE;
      END IF;
      -- Its lease says when there is more.
      CONTINUE WHEN c.lease IS NOT NULL;
      IF q.window_seconds > 0 AND v_pushed + q.window_seconds * interval '1 second' > t THEN
        INSERT INTO mq_ready (partition, grp, at) VALUES (v_part, v_grp, v_pushed + q.window_seconds * interval '1 second');
        CONTINUE;
      END IF;
      -- Nothing is handed out that waited too long, whether or not a sweep came by.
      IF q.max_wait_seconds > 0 THEN
        v_old := t - q.max_wait_seconds * interval '1 second';
        IF v_old > (SELECT z.created_at FROM mq_messages z WHERE z.partition = v_part AND z.seq > c.head ORDER BY z.seq LIMIT 1) THEN
          v_most := v_most - mq_give_up(v_part, v_grp, mq_before(v_part, v_old), v_most);
          IF v_most <= 0 THEN
            more := true;
            INSERT INTO mq_ready (partition, grp, at) VALUES (v_part, v_grp, t);
            EXIT;
          END IF;
          SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = v_part AND x.grp = v_grp;
        END IF;
      END IF;
      v_limit := CASE WHEN c.careful > c.head THEN 1 ELSE v_left END;
      -- What is due is a beginning of what is there, and so is what the answer has room for.
      SELECT array_agg(x.seq) AS seqs, array_agg(x.id) AS ids, array_agg(x.transaction_id) AS txs, array_agg(x.trace_id) AS traces, array_agg(x.sealed) AS sealed,
          string_agg(x.payload, E'\\x1e' ORDER BY x.seq) AS payloads, array_agg((extract(epoch FROM x.created_at) * 1000)::bigint) AS created,
          array_agg(coalesce((c.tries->>(x.seq::text))::int, 0)) AS tries, max(x.bytes) AS bytes
        INTO m FROM (
          SELECT y.*, sum(octet_length(y.payload)) OVER (ORDER BY y.seq) AS bytes, row_number() OVER (ORDER BY y.seq) AS n FROM (
            SELECT z.seq, z.id, z.transaction_id, z.trace_id, z.sealed, z.payload, z.created_at FROM mq_messages z
            WHERE z.partition = v_part AND z.seq > c.head AND (c.done = '{}' OR NOT z.seq = ANY (c.done)) AND (z.grp IS NULL OR z.grp = v_grp)
            ORDER BY z.seq LIMIT v_limit
          ) y WHERE q.delay_seconds = 0 OR y.created_at <= t - q.delay_seconds * interval '1 second'
        ) x WHERE x.bytes <= p_bytes - v_bytes OR x.n = 1 AND v_bytes = 0;
      IF m.seqs IS NULL THEN
        -- Due, but there is no room for it.
        IF v_bytes > 0 AND (SELECT q.delay_seconds = 0 OR z.created_at <= t - q.delay_seconds * interval '1 second' FROM mq_messages z
            WHERE z.partition = v_part AND z.seq > c.head AND NOT z.seq = ANY (c.done) AND (z.grp IS NULL OR z.grp = v_grp) ORDER BY z.seq LIMIT 1) THEN
          INSERT INTO mq_ready (partition, grp, at) VALUES (v_part, v_grp, v_at);
          EXIT;
        END IF;
        -- Nothing is there, or nothing is due. What is gone is not waited for; the lock keeps the tail where it is.
        SELECT p.tail INTO v_tail FROM mq_partitions p WHERE p.id = v_part FOR SHARE;
        SELECT z.created_at INTO v_first FROM mq_messages z WHERE z.partition = v_part AND z.seq > c.head AND NOT z.seq = ANY (c.done) AND (z.grp IS NULL OR z.grp = v_grp) ORDER BY z.seq LIMIT 1;
        IF FOUND THEN
          INSERT INTO mq_ready (partition, grp, at) VALUES (v_part, v_grp, greatest(t, v_first + q.delay_seconds * interval '1 second') + interval '1 ms');
        ELSE
          UPDATE mq_cursors x SET head = greatest(x.head, v_tail), done = '{}', tries = '{}' WHERE x.partition = v_part AND x.grp = v_grp;
        END IF;
        CONTINUE;
      END IF;
      -- What is sealed is settled by the caller once it could be read.
      IF p_auto AND NOT true = ANY (m.sealed) THEN
        c.head := m.seqs[cardinality(m.seqs)];
        UPDATE mq_cursors x SET head = c.head, done = ARRAY(SELECT d FROM unnest(c.done) d WHERE d > c.head), tries = '{}', consumed = x.consumed + cardinality(m.seqs), moved_at = t
          WHERE x.partition = v_part AND x.grp = v_grp;
        PERFORM mq_requeue(v_part, v_grp, c.head, NULL);
      ELSE
        leased := true;
        UPDATE mq_cursors x SET lease = p_lease, batch = m.seqs, open = m.seqs WHERE x.partition = v_part AND x.grp = v_grp;
      END IF;
      parts := parts || v_part; names := names || v_name;
      ix := ix || array_fill(cardinality(parts), ARRAY[cardinality(m.seqs)]);
      ids := ids || m.ids; transactions := transactions || m.txs; traces := traces || m.traces; sealed := sealed || m.sealed;
      payloads := CASE WHEN payloads = '' THEN m.payloads ELSE payloads || E'\\x1e' || m.payloads END;
      created_ms := created_ms || m.created; tries := tries || m.tries;
      v_left := v_left - cardinality(m.seqs); v_bytes := v_bytes + m.bytes;
    END LOOP;
    -- Others wait behind what it has joined so far: it goes on joining whatever it found. One partition may have joined by itself.
    IF v_reached IS NOT NULL AND (p_partition IS NULL OR cardinality(parts) = 0 AND NOT EXISTS (SELECT FROM mq_partitions p LEFT JOIN mq_cursors x ON x.partition = p.id AND x.grp = v_grp
        WHERE p.queue = q.id AND p.name = p_partition AND (p.id <= v_reached OR x.head IS NOT NULL))) THEN
      missing := ARRAY[q.id];
    END IF;
    IF cardinality(parts) > 0 THEN
      queue := q.name; namespace := q.namespace; task := q.task;
      -- Small ones are bounded by their number.
      IF v_bytes > 65536 THEN PERFORM set_config('spillway.popped_bytes', (coalesce(v_flushed, 0) + v_bytes)::text, true); END IF;
      IF leased THEN
        INSERT INTO mq_leases (id, grp, until, partitions) VALUES (p_lease, v_grp, t + q.lease_seconds * interval '1 second',
          ARRAY(SELECT x.partition FROM mq_cursors x WHERE x.partition = ANY (parts) AND x.grp = v_grp AND x.lease = p_lease));
      END IF;
      RETURN;
    END IF;
    EXIT WHEN more;
    SELECT least(v_due, (SELECT x.at FROM mq_ready x WHERE x.grp = v_grp ORDER BY x.at LIMIT 1), (SELECT l.until FROM mq_leases l WHERE l.grp = v_grp ORDER BY l.until LIMIT 1)) INTO v_due;
  END LOOP;
  due_ms := ceil(extract(epoch FROM v_due - clock()) * 1000);
END $$;

-- Answers to deliveries, any number of partitions and groups. Outcomes, in the order of what came: done, retry, dead,
-- skipped, unknown (no such message, or not delivered to this group), lost (the lease is over, or another's).
CREATE FUNCTION mq_ack(p_partitions uuid[], p_groups text[], p_leases uuid[], p_transactions text[], p_statuses text[], p_errors text[]) RETURNS text[]
LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET jit = off AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  outcomes text[] := array_fill('unknown'::text, ARRAY[cardinality(p_partitions)]);
  r record; a record; c mq_cursors; v_limit int; v_delay int; v_letters boolean; v_grp int; v_live boolean;
  v_buried bigint[]; v_why text[]; v_letter bigint[]; v_letter_why text[]; v_n int; v_done int; v_seqs bigint[]; v_leases uuid[] := '{}'; v_parts uuid[] := '{}';
BEGIN
  FOR r IN SELECT u.part, u.grp, array_agg(u.i::int) AS ixs, array_agg(u.tx) AS txs, array_agg(u.lease) AS leases, array_agg(u.status) AS statuses, array_agg(u.error) AS errors
           FROM unnest(p_partitions, p_groups, p_transactions, p_leases, p_statuses, p_errors) WITH ORDINALITY u(part, grp, tx, lease, status, error, i)
           GROUP BY u.part, u.grp ORDER BY u.part, u.grp LOOP
    SELECT g.id, q.retry_limit, q.retry_delay_ms, q.dead_letter_queue OR q.dlq_after_max_retries INTO v_grp, v_limit, v_delay, v_letters
      FROM mq_partitions p JOIN mq_queues q ON q.id = p.queue JOIN mq_groups g ON g.queue = q.id AND g.name = r.grp WHERE p.id = r.part;
    CONTINUE WHEN NOT FOUND;
    SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = r.part AND x.grp = v_grp FOR UPDATE;
    CONTINUE WHEN NOT FOUND;
    t := clock();
    v_live := c.lease IS NOT NULL AND EXISTS (SELECT FROM mq_leases l WHERE l.id = c.lease AND l.until > t);
    -- Mostly a batch is completed as a whole: that takes no turn for each of it.
    IF v_live AND cardinality(r.txs) = cardinality(c.open)
        AND NOT EXISTS (SELECT FROM unnest(r.statuses, r.leases) u(status, lease) WHERE u.status <> 'completed' OR u.lease <> c.lease) THEN
      SELECT array_agg(x.seq) INTO v_seqs FROM (
        SELECT DISTINCT m.seq FROM unnest(r.txs) u(tx) JOIN mq_messages m ON m.partition = r.part AND m.transaction_id = u.tx AND m.grp IS NULL ORDER BY m.seq) x;
      IF v_seqs = c.open THEN
        IF cardinality(r.ixs) = cardinality(outcomes) THEN outcomes := array_fill('done'::text, ARRAY[cardinality(outcomes)]);
        ELSE FOREACH v_n IN ARRAY r.ixs LOOP outcomes[v_n] := 'done'; END LOOP; END IF;
        v_leases := v_leases || mq_end(r.part, v_grp, v_seqs); v_parts := v_parts || r.part;
        CONTINUE;
      END IF;
    END IF;
    v_buried := '{}'; v_why := '{}'; v_letter := '{}'; v_letter_why := '{}'; v_done := 0;
    FOR a IN
      SELECT u.i, u.lease, u.status, u.error, m.seq FROM unnest(r.ixs, r.txs, r.leases, r.statuses, r.errors) u(i, tx, lease, status, error)
        -- Two arms: each has its index.
        LEFT JOIN LATERAL (SELECT x.seq FROM mq_messages x WHERE x.partition = r.part AND x.transaction_id = u.tx AND x.grp IS NULL
          UNION ALL SELECT x.seq FROM mq_messages x WHERE x.partition = r.part AND x.transaction_id = u.tx AND x.grp IS NOT NULL AND x.grp = v_grp) m ON true
      ORDER BY u.i, m.seq = ANY (c.open)
    LOOP
      CONTINUE WHEN a.seq IS NULL;
      IF NOT v_live OR a.lease IS DISTINCT FROM c.lease AND a.lease IS NOT NULL THEN outcomes[a.i] := 'lost'; CONTINUE; END IF;
      -- Answered before, or never delivered.
      IF NOT a.seq = ANY (c.open) THEN
        IF outcomes[a.i] = 'unknown' THEN outcomes[a.i] := CASE WHEN a.seq <= c.head OR a.seq = ANY (c.batch) THEN 'lost' ELSE 'unknown' END; END IF;
        CONTINUE;
      END IF;
      c.open := array_remove(c.open, a.seq);
      IF a.status = 'completed' THEN
        outcomes[a.i] := 'done'; c.done := c.done || a.seq; v_done := v_done + 1;
        CONTINUE;
      END IF;
      -- Handed back, not failed: at once again, and not counted.
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
    UPDATE mq_cursors x SET open = c.open, done = c.done, tries = c.tries, not_before = c.not_before, consumed = x.consumed + v_done, moved_at = t WHERE x.partition = r.part AND x.grp = v_grp;
    IF c.open = '{}' THEN v_leases := v_leases || mq_end(r.part, v_grp); v_parts := v_parts || r.part; END IF;
  END LOOP;
  PERFORM mq_unlease(v_leases, v_parts);
  RETURN outcomes;
END $$;

CREATE FUNCTION mq_extend(p_lease uuid, p_seconds int) RETURNS timestamptz LANGUAGE sql SET search_path FROM CURRENT AS $$
  UPDATE mq_leases l SET until = greatest(l.until, clock() + coalesce(p_seconds, (SELECT q.lease_seconds FROM mq_groups g JOIN mq_queues q ON q.id = g.queue WHERE g.id = l.grp)) * interval '1 second')
  WHERE l.id = p_lease AND l.until > clock() RETURNING l.until
$$;

-- Of what somebody waits for here: what is ready. Ends deliveries that are over, too.
CREATE FUNCTION mq_due(p_queues text[], p_groups text[]) RETURNS TABLE (queue text, grp text) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  IF EXISTS (SELECT FROM mq_leases l WHERE l.until <= clock()) THEN PERFORM mq_expire(NULL, 1000); END IF;
  RETURN QUERY SELECT u.queue, u.grp FROM unnest(p_queues, p_groups) u(queue, grp) JOIN mq_queues q ON q.name = u.queue LEFT JOIN mq_groups g ON g.queue = q.id AND g.name = u.grp
    WHERE g.id IS NULL OR g.reached IS NOT NULL OR EXISTS (SELECT FROM mq_ready r WHERE r.grp = g.id AND r.at <= clock());
END $$;

-- Moves a group to where it is to go on, in the next p_partitions partitions of a queue behind p_after; p_to: start, end, or a
-- time. What is leased is lost. moved NULL: there is no such queue or group.
CREATE FUNCTION mq_seek(p_queue text, p_group text, p_to text, p_at timestamptz, p_after uuid, p_partitions int, OUT moved bigint, OUT last uuid) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_queue int; v_grp int; r record; v_head bigint; v_lease uuid; v_leases uuid[] := '{}'; v_parts uuid[] := '{}';
BEGIN
  SELECT q.id, g.id INTO v_queue, v_grp FROM mq_queues q JOIN mq_groups g ON g.queue = q.id WHERE q.name = p_queue AND g.name = p_group;
  -- Nobody joins meanwhile.
  IF NOT FOUND OR NOT mq_guard(ARRAY[v_queue], false) THEN RETURN; END IF;
  UPDATE mq_queues q SET size_most = NULL WHERE q.id = v_queue AND q.size_most IS NOT NULL;
  moved := 0;
  FOR r IN SELECT p.id, p.tail, p.low FROM mq_partitions p WHERE p.queue = v_queue AND (p_after IS NULL OR p.id > p_after) ORDER BY p.id LIMIT p_partitions LOOP
    INSERT INTO mq_cursors AS x (partition, grp, head) VALUES (r.id, v_grp, 0) ON CONFLICT (partition, grp) DO UPDATE SET head = x.head RETURNING x.lease INTO v_lease;
    IF v_lease IS NOT NULL THEN v_leases := v_leases || v_lease; v_parts := v_parts || r.id; END IF;
    v_head := CASE p_to WHEN 'start' THEN r.low WHEN 'end' THEN r.tail ELSE mq_before(r.id, p_at) END;
    UPDATE mq_cursors x SET head = v_head, done = '{}', lease = NULL, batch = '{}', open = '{}', tries = '{}', careful = 0, not_before = NULL, moved_at = clock() WHERE x.partition = r.id AND x.grp = v_grp;
    DELETE FROM mq_ready d WHERE d.partition = r.id AND d.grp = v_grp;
    PERFORM mq_requeue(r.id, v_grp, v_head, NULL);
    moved := moved + 1; last := r.id;
  END LOOP;
  PERFORM mq_unlease(v_leases, v_parts);
END $$;

-- What has been kept long enough goes. Consumed by every group: when that is completed_retention_seconds ago, which is known
-- to within the time between two sweeps. Not consumed: only where the queue says so (retention_seconds, max_wait_seconds).
-- The next p_partitions behind p_after, and the last of them: a sweep is many short transactions.
CREATE FUNCTION mq_sweep(p_most int, p_after uuid, p_partitions int, OUT removed bigint, OUT given_up bigint, OUT traces bigint, OUT last uuid) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  r record; c record; v_min bigint; v_upto bigint; v_gone bigint;
BEGIN
  removed := 0; given_up := 0;
  FOR r IN SELECT p.id, p.queue, p.low, p.tail, p.mark, p.marked_at, q.retention_enabled, q.retention_seconds, q.completed_retention_seconds, q.max_wait_seconds
           FROM mq_queues q JOIN mq_partitions p ON p.queue = q.id WHERE (q.retention_enabled OR q.max_wait_seconds > 0) AND p.low < p.tail AND (p_after IS NULL OR p.id > p_after)
           ORDER BY p.id LIMIT p_partitions LOOP
    EXIT WHEN removed >= p_most OR given_up >= p_most;
    last := r.id;
    -- Where a group joins at this moment, the next round gives up what waited too long.
    IF r.max_wait_seconds > 0 AND pg_try_advisory_xact_lock_shared(hashtext('spillway.groups.' || current_schema()), r.queue) THEN
      v_upto := mq_before(r.id, t - r.max_wait_seconds * interval '1 second');
      INSERT INTO mq_cursors (partition, grp, head) SELECT r.id, g.id, h.head FROM mq_groups g LEFT JOIN mq_cursors x ON x.partition = r.id AND x.grp = g.id LEFT JOIN mq_ready y ON y.partition = r.id AND y.grp = g.id
          CROSS JOIN LATERAL (SELECT coalesce(y.head, CASE WHEN r.id > g.reached THEN mq_start(r.id, r.low, g.starts) ELSE r.tail END) AS head) h
        WHERE g.queue = r.queue AND v_upto > r.low AND x.head IS NULL AND h.head < v_upto ORDER BY g.id ON CONFLICT (partition, grp) DO NOTHING;
      FOR c IN SELECT x.grp FROM mq_cursors x WHERE x.partition = r.id AND x.head < v_upto AND x.lease IS NULL ORDER BY x.grp FOR UPDATE SKIP LOCKED LOOP
        given_up := given_up + mq_give_up(r.id, c.grp, v_upto, p_most);
        DELETE FROM mq_ready d WHERE d.partition = r.id AND d.grp = c.grp;
        PERFORM mq_requeue(x.partition, x.grp, x.head, NULL) FROM mq_cursors x WHERE x.partition = r.id AND x.grp = c.grp;
      END LOOP;
    END IF;
    CONTINUE WHEN NOT r.retention_enabled;
    IF r.retention_seconds > 0 THEN removed := removed + mq_cut(r.id, mq_before(r.id, t - r.retention_seconds * interval '1 second'), p_most); END IF;
    v_min := mq_slowest(r.queue, r.id, r.low, r.tail);
    IF r.completed_retention_seconds = 0 THEN
      IF v_min > r.low THEN removed := removed + mq_cut(r.id, v_min, p_most); END IF;
    ELSIF r.marked_at IS NULL OR r.marked_at <= t - r.completed_retention_seconds * interval '1 second' THEN
      IF r.marked_at IS NOT NULL AND r.mark > r.low THEN
        v_gone := mq_cut(r.id, r.mark, p_most);
        removed := removed + v_gone;
        -- Not all of it: the mark stands until it is.
        CONTINUE WHEN v_gone >= p_most;
      END IF;
      UPDATE mq_partitions p SET mark = greatest(p.mark, coalesce(v_min, 0)), marked_at = t WHERE p.id = r.id AND coalesce(v_min, 0) > p.low;
    END IF;
  END LOOP;
  WITH old AS (DELETE FROM mq_traces x WHERE x.id IN (SELECT y.id FROM (SELECT z.id, z.created_at FROM mq_traces z ORDER BY z.id LIMIT p_most) y WHERE y.created_at < t - interval '30 days') RETURNING 1) SELECT count(*) INTO traces FROM old;
END $$;

-- Ends groups of this name, of one queue or of all. p_forget false: each begins anew behind the time at which it began once.
CREATE FUNCTION mq_unsubscribe(p_group text, p_queue text, p_forget boolean) RETURNS TABLE (queue text, partitions bigint) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  r record;
BEGIN
  PERFORM mq_guard(ARRAY(SELECT g.queue FROM mq_groups g JOIN mq_queues q ON q.id = g.queue WHERE g.name = p_group AND (p_queue IS NULL OR q.name = p_queue)), true);
  FOR r IN SELECT g.id, g.queue, g.mode, g.since, q.name, (SELECT count(*) FROM mq_cursors c WHERE c.grp = g.id) AS n
           FROM mq_groups g JOIN mq_queues q ON q.id = g.queue WHERE g.name = p_group AND (p_queue IS NULL OR q.name = p_queue) ORDER BY g.id LOOP
    DELETE FROM mq_cursors c WHERE c.grp = r.id;
    DELETE FROM mq_ready x WHERE x.grp = r.id;
    DELETE FROM mq_leases l WHERE l.grp = r.id;
    DELETE FROM mq_groups g WHERE g.id = r.id;
    IF NOT p_forget THEN PERFORM mq_subscribe(r.queue, p_group, CASE WHEN r.mode = 'all' THEN 'all' ELSE 'time' END, r.since); END IF;
    queue := r.name; partitions := r.n;
    RETURN NEXT;
  END LOOP;
END $$;

-- A dead letter goes back to the end of its partition, for the group that gave it up alone.
CREATE FUNCTION mq_replay(p_id uuid) RETURNS TABLE (queue text, partition uuid, message_id uuid, transaction_id text) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  d mq_dead; v_grp int; v_tail bigint; v_queue int;
BEGIN
  SELECT x.* INTO d FROM mq_dead x WHERE x.id = p_id FOR UPDATE;
  IF NOT FOUND THEN RETURN; END IF;
  -- Until both are guarded: what is deleted while this waits is made anew.
  LOOP
    v_queue := mq_queue(d.queue);
    PERFORM mq_guard(ARRAY[v_queue], false);
    SELECT g.id INTO v_grp FROM mq_groups g WHERE g.queue = v_queue AND g.name = d.grp;
    IF NOT FOUND THEN v_grp := mq_subscribe(v_queue, d.grp, 'all', NULL); END IF;
    EXIT WHEN v_grp IS NOT NULL;
  END LOOP;
  INSERT INTO mq_partitions AS p (id, queue, name, tail, pushed_at, created_at) VALUES (d.partition, v_queue, d.partition_name, 1, clock(), clock())
    ON CONFLICT (id) DO UPDATE SET tail = p.tail + 1, pushed_at = clock() RETURNING p.tail INTO v_tail;
  INSERT INTO mq_messages (partition, seq, id, transaction_id, trace_id, grp, sealed, payload, created_at)
    VALUES (d.partition, v_tail, d.message_id, d.transaction_id, d.trace_id, v_grp, d.sealed, d.payload, date_trunc('milliseconds', clock()));
  DELETE FROM mq_dead x WHERE x.id = p_id;
  UPDATE mq_queues q SET size_most = q.size_most + 1 WHERE q.id = v_queue AND q.size_most IS NOT NULL;
  -- As a push does.
  INSERT INTO mq_ready (partition, grp, at, head) SELECT d.partition, g.id, clock(), CASE WHEN c.head IS NULL THEN v_tail - 1 END
    FROM mq_groups g LEFT JOIN mq_cursors c ON c.partition = d.partition AND c.grp = g.id
    WHERE g.queue = v_queue AND c.lease IS NULL AND CASE WHEN c.head IS NOT NULL THEN c.head >= v_tail - 1
      ELSE d.partition > g.reached IS NOT TRUE AND (SELECT x.grp FROM mq_ready x WHERE x.partition = d.partition AND x.grp = g.id) IS NULL END
    ON CONFLICT (partition, grp) DO NOTHING;
  PERFORM mq_tell(ARRAY[d.queue]);
  queue := d.queue; partition := d.partition; message_id := d.message_id; transaction_id := d.transaction_id;
  RETURN NEXT;
END $$;
`,
}
