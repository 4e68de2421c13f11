-- Moves a consumer group to another position.

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
