-- How a delivery ends. Every end (the last ack, expiry, seek) calls mq_end, which moves the cursor and decides
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

-- A delivery has ended: it has no open messages. The caller holds the cursor's lock, and has to call `mq_unlease` for
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
