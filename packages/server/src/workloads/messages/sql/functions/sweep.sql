-- Retention: deletes from the log what was kept long enough.

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
