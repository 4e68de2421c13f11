-- Takes a pending operation out of its lane, because it was cancelled or has expired, or asks a running one to stop.

-- Takes a pending operation out of its lane. 'asked' when it runs and its handler can stop, 'running' when it cannot,
-- 'gone' when it is not in the queue. With a code it has failed with that, and only if
-- it has expired. Who holds the lane's ready or parked row, or sees its lease, knows where it is.
CREATE OR REPLACE FUNCTION withdraw(p_id uuid, p_abortable text[], p_why text, p_code text) RETURNS text
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  o record; f record;
  v_at tid; v_upto bigint; v_where text; v_depth bigint; v_key uuid;
BEGIN
  PERFORM pause_guard();
  SELECT x.lane, x.seq, x.type, x.idem, x.gate INTO o FROM ops x WHERE x.id = p_id;
  IF NOT FOUND THEN RETURN 'gone'; END IF;
  PERFORM FROM idempotency d WHERE d.key = o.idem FOR UPDATE;
  PERFORM FROM gates g WHERE g.name = o.gate FOR UPDATE;
  SELECT l.key INTO v_key FROM lanes l WHERE l.id = o.lane FOR UPDATE;
  IF v_key IS NOT NULL THEN PERFORM FROM turns k WHERE k.key = v_key FOR UPDATE; END IF;
  SELECT x.seq INTO o.seq FROM ops x WHERE x.id = p_id AND (p_code IS NULL OR x.expires_at <= t) FOR UPDATE;
  IF NOT FOUND THEN RETURN 'gone'; END IF;
  FOR i IN 1 .. 20 LOOP
    SELECT x.seq, x.priority, x.stamp INTO f FROM lanes l, ops x
      WHERE l.id = o.lane AND x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1;
    SELECT x.ctid INTO v_at FROM ready x
      WHERE x.priority = f.priority AND x.stamp = f.stamp AND x.lane = o.lane FOR UPDATE;
    IF FOUND THEN v_where := 'ready'; EXIT; END IF;
    PERFORM FROM parked x WHERE x.lane = o.lane FOR UPDATE;
    IF FOUND THEN v_where := 'parked'; EXIT; END IF;
    SELECT z.upto INTO v_upto FROM leases l, unnest(l.lanes, l.uptos) z(lane, upto) WHERE z.lane = o.lane;
    IF FOUND THEN v_where := 'leased'; EXIT; END IF;
    -- It was on its way from parked to ready: look again.
  END LOOP;
  IF v_where IS NULL THEN
    RAISE EXCEPTION 'lane % has operations but is nowhere', o.lane USING ERRCODE = 'XX000';
  END IF;
  IF v_where = 'leased' AND o.seq <= v_upto THEN
    IF NOT o.type = ANY (p_abortable) THEN RETURN 'running'; END IF;
    INSERT INTO cancels (id, asked_at) VALUES (p_id, t) ON CONFLICT DO NOTHING;
    RETURN 'asked';
  END IF;
  WITH gone AS (DELETE FROM ops x WHERE x.lane = o.lane AND x.seq = o.seq RETURNING x.*)
  INSERT INTO history (id, finished_at, status, type, queue, partition, priority, identity, accepted_at, attempts,
      max_attempts, error, trace, code)
    SELECT g.id, t, CASE WHEN p_code IS NULL THEN 'cancelled' ELSE 'failed' END, g.type, l.queue, l.partition,
      g.priority, g.identity, g.accepted_at, g.attempts, g.max_attempts, p_why, g.trace, p_code
    FROM gone g JOIN lanes l ON l.id = g.lane;
  UPDATE lanes l
    SET depth = l.depth - 1, head = CASE WHEN f.seq = o.seq AND v_where <> 'leased' THEN o.seq ELSE l.head END
    WHERE l.id = o.lane RETURNING l.depth INTO v_depth;
  IF v_where <> 'leased' AND f.seq = o.seq THEN
    DELETE FROM ready x WHERE x.ctid = v_at AND v_where = 'ready';
    DELETE FROM parked x WHERE x.lane = o.lane AND v_where = 'parked';
    IF v_depth > 0 THEN PERFORM lane_requeue(o.lane); ELSE PERFORM lanes_drop(ARRAY[o.lane]); END IF;
    IF v_key IS NOT NULL THEN
      UPDATE turns k SET running = k.running - (v_where = 'ready')::int, lanes = k.lanes - 1 WHERE k.key = v_key;
      PERFORM turns_next(ARRAY[v_key]);
    END IF;
  END IF;
  IF o.idem IS NOT NULL THEN
    UPDATE idempotency d SET answer = CASE WHEN p_code IS NULL THEN json_build_object('v', 'cancelled')
        ELSE json_build_object('v', 'failed', 'error', p_why, 'code', p_code, 'status', 504) END
      WHERE d.key = o.idem AND d.op = p_id AND d.answer IS NULL;
  END IF;
  IF o.gate IS NOT NULL THEN PERFORM gates_release(ARRAY[o.gate], ARRAY[1::bigint]); END IF;
  PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, o.type, -1);
  RETURN 'cancelled';
END $$;

CREATE OR REPLACE FUNCTION cancel(p_id uuid, p_abortable text[], p_why text) RETURNS text
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT withdraw(p_id, p_abortable, p_why, NULL)
$$;

-- Up to p_most operations that wait although their time is over, oldest first.
CREATE OR REPLACE FUNCTION expired(p_most int) RETURNS TABLE (id uuid, type text)
  LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT o.id, o.type FROM ops o WHERE o.expires_at <= clock() AND o.started_at IS NULL ORDER BY o.expires_at
  LIMIT p_most
$$;
