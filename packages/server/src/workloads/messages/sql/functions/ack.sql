-- Acks of delivered messages.

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
