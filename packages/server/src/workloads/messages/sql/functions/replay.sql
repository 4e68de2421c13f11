-- Puts a dead letter back into its partition.

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
