-- The effect of a push (store/port.ts, StoreEffect): numbers and stores the messages, in the accepting transaction.
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
  v_payloads text[] := string_to_array(p_payloads, E'\x1e');
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
