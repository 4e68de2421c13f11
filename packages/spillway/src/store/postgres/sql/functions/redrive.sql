-- Dead letters: back into their lanes, or removed.

-- Dead letters join the tail of their lanes again, in the order in which they were accepted, with all their attempts.
-- Those whose capacity gate is full stay where they are.
CREATE OR REPLACE FUNCTION redrive(p_ids uuid[]) RETURNS TABLE (moved int, skipped int)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  d record; g record;
  v_depth bigint; v_tail bigint; v_stamp bigint;
BEGIN
  PERFORM pause_guard();
  moved := 0; skipped := 0;
  PERFORM FROM dead_letters x WHERE x.id = ANY (p_ids) ORDER BY x.id FOR UPDATE;
  PERFORM FROM gates x WHERE x.name IN (SELECT y.gate FROM dead_letters y WHERE y.id = ANY (p_ids))
    ORDER BY x.name FOR UPDATE;
  -- Those with keys last: a key's lock comes after those of all lanes.
  FOR d IN SELECT x.* FROM dead_letters x WHERE x.id = ANY (p_ids) ORDER BY x.key NULLS FIRST, x.lane, x.seq LOOP
    IF d.gate IS NOT NULL THEN
      UPDATE gates x SET held = x.held + 1, overflowing = x.held + 1 >= x.full_at
        WHERE x.name = d.gate AND NOT x.overflowing AND x.held < x.full_at;
      IF NOT FOUND THEN
        skipped := skipped + 1;
        CONTINUE;
      END IF;
    END IF;
    INSERT INTO lanes AS l (id, queue, partition, tail, depth, moved_at, sweep_at, alone, key, turn)
      VALUES (d.lane, d.queue, d.partition, 1, 1, t, t + interval '1 hour', d.lane = d.id, d.key,
        CASE WHEN d.key IS NOT NULL THEN nextval('turn_numbers') END)
      ON CONFLICT (id) DO UPDATE SET tail = l.tail + 1, depth = l.depth + 1,
        moved_at = CASE WHEN l.depth = 0 THEN t ELSE l.moved_at END
      RETURNING l.depth, l.tail INTO v_depth, v_tail;
    v_stamp := coalesce((SELECT x.stamp FROM ready x WHERE x.priority = d.priority ORDER BY x.stamp
          LIMIT 1), (SELECT s.last_value FROM stamps s));
    INSERT INTO ops (lane, seq, id, type, priority, stamp, identity, payload, accepted_at, max_attempts, timeout_ms,
        trace, gate)
      VALUES (d.lane, v_tail, d.id, d.type, d.priority, v_stamp, d.identity, d.payload, d.accepted_at,
          d.max_attempts, d.timeout_ms, d.trace, d.gate);
    IF d.key IS NOT NULL THEN
      INSERT INTO turns AS k (key, queue, partition, most, lanes) VALUES (d.key, d.queue, d.partition, d.most, 1)
        ON CONFLICT (key) DO UPDATE SET lanes = k.lanes + 1;
    END IF;
    IF v_depth = 1 THEN PERFORM lane_requeue(d.lane); END IF;
    IF d.key IS NOT NULL THEN PERFORM turns_next(ARRAY[d.key]); END IF;
    DELETE FROM dead_letters x WHERE x.id = d.id;
    DELETE FROM cancels x WHERE x.id = d.id;
    PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, d.type, 1);
    moved := moved + 1;
  END LOOP;
  PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, '!dead', - moved) WHERE moved > 0;
  RETURN NEXT;
END $$;

CREATE OR REPLACE FUNCTION purge(p_ids uuid[]) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  v_n int;
BEGIN
  DELETE FROM dead_letters x WHERE x.id = ANY (p_ids);
  GET DIAGNOSTICS v_n = ROW_COUNT;
  PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, '!dead', - v_n) WHERE v_n > 0;
  RETURN v_n;
END $$;
