-- Deletions by operators: all messages of a queue, a queue, a single message.

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
