-- Where a consumer group is, and how it begins.
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
