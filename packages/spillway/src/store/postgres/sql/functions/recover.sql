-- Returns the lanes of leases that end without a settlement: of a process that died, one that stops, or one that never
-- got the answer to its claim.
--
-- Counting deliveries after a crash: a claim hands out several operations, and only one per lane can have killed the
-- process. The first one is charged if it surely ran, that is if its start was recorded (mark). Otherwise none is
-- charged, and the lane is claimed one operation at a time (careful), each marked before it runs, until the suspects
-- are through. An operation that kills its process every time becomes a dead letter, and its neighbours are not
-- charged for it.

-- Takes one operation out of its lane for good. The caller holds the locks of the lane and of its key, and has given
-- back the lane's permit.
CREATE OR REPLACE FUNCTION bury(p_lane uuid, p_seq bigint, p_error text) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  WITH gone AS (DELETE FROM ops o WHERE o.lane = p_lane AND o.seq = p_seq RETURNING o.*)
  INSERT INTO dead_letters (id, died_at, lane, seq, queue, partition, type, priority, identity, payload, accepted_at,
      started_at, attempts, max_attempts, timeout_ms, error, trace, gate, key, most)
  SELECT g.id, t, g.lane, g.seq, l.queue, l.partition, g.type, g.priority, g.identity, g.payload, g.accepted_at,
    g.started_at, g.attempts, g.max_attempts, g.timeout_ms, p_error, g.trace, g.gate, l.key,
    (SELECT k.most FROM turns k WHERE k.key = l.key)
  FROM gone g JOIN lanes l ON l.id = g.lane;
  UPDATE lanes l SET head = greatest(l.head, p_seq), depth = l.depth - 1, moved_at = t WHERE l.id = p_lane;
  UPDATE turns k SET lanes = k.lanes - 1 FROM lanes l WHERE l.id = p_lane AND k.key = l.key;
  PERFORM lanes_drop(ARRAY[p_lane]);
END $$;

-- Gives back the lanes of leases that end without a settlement. p_charge: did a process die over them?
CREATE OR REPLACE FUNCTION leases_return(p_fences bigint[], p_charge boolean) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  r record; o record;
  v_lanes uuid[]; v_uptos bigint[]; v_n int := 0; v_keys uuid[];
BEGIN
  PERFORM pause_guard();
  WITH ended AS (DELETE FROM leases l WHERE l.fence = ANY (p_fences) RETURNING l.lanes, l.uptos)
  SELECT array_agg(z.lane ORDER BY z.lane), array_agg(z.upto ORDER BY z.lane) INTO v_lanes, v_uptos
    FROM ended e, unnest(e.lanes, e.uptos) z(lane, upto);
  IF v_lanes IS NULL THEN RETURN 0; END IF;
  IF p_charge THEN
    -- Keys and gates of what will be buried come before the lanes in the lock order.
    PERFORM FROM idempotency d WHERE d.key IN (
      SELECT x.idem FROM unnest(v_lanes) u(id) JOIN lanes l ON l.id = u.id, LATERAL (
        SELECT y.idem, y.attempts, y.max_attempts FROM ops y WHERE y.lane = l.id AND y.seq > l.head ORDER BY y.seq
          LIMIT 1) x
      WHERE x.idem IS NOT NULL AND x.attempts + 1 >= x.max_attempts) ORDER BY d.key FOR UPDATE;
    PERFORM FROM gates g WHERE g.name IN (
      SELECT x.gate FROM unnest(v_lanes) u(id) JOIN lanes l ON l.id = u.id, LATERAL (
        SELECT y.gate FROM ops y WHERE y.lane = l.id AND y.seq > l.head ORDER BY y.seq LIMIT 1) x
      WHERE x.gate IS NOT NULL) ORDER BY g.name FOR UPDATE;
  END IF;
  PERFORM FROM lanes l WHERE l.id = ANY (v_lanes) ORDER BY l.id FOR UPDATE;
  PERFORM turns_lock(v_lanes);
  WITH given AS (
    UPDATE turns k SET running = k.running - g.n
      FROM (SELECT l.key, count(*) AS n FROM lanes l WHERE l.id = ANY (v_lanes) AND l.key IS NOT NULL GROUP BY l.key) g
      WHERE k.key = g.key RETURNING k.key
  ) SELECT array_agg(g.key) INTO v_keys FROM given g;
  FOR r IN SELECT u.lane, u.upto FROM unnest(v_lanes, v_uptos) u(lane, upto) ORDER BY u.lane LOOP
    v_n := v_n + 1;
    UPDATE lanes l SET running = false WHERE l.id = r.lane;
    IF p_charge THEN
      SELECT x.seq, x.id, x.type, x.started_at, x.attempts, x.max_attempts, x.idem, x.gate INTO o FROM lanes l, ops x
        WHERE l.id = r.lane AND x.lane = l.id AND x.seq > l.head AND x.seq <= r.upto ORDER BY x.seq LIMIT 1;
      IF FOUND AND o.started_at IS NOT NULL THEN
        UPDATE ops x SET attempts = x.attempts + 1, started_at = NULL, error = 'The process that ran it was lost'
          WHERE x.lane = r.lane AND x.seq = o.seq;
        IF o.attempts + 1 >= o.max_attempts THEN
          IF o.idem IS NOT NULL THEN
            UPDATE idempotency d
              SET answer = json_build_object('v', 'failed', 'error', 'The process that ran it was lost')
                WHERE d.key = o.idem AND d.op = o.id AND d.answer IS NULL;
          END IF;
          IF o.gate IS NOT NULL THEN PERFORM gates_release(ARRAY[o.gate], ARRAY[1::bigint]); END IF;
          PERFORM bury(r.lane, o.seq, 'The process that ran it was lost, ' || (o.attempts + 1) || ' times');
          PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, o.type, -1);
          PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, '!dead', 1);
        END IF;
      END IF;
      UPDATE lanes l SET careful = greatest(l.careful, r.upto) WHERE l.id = r.lane;
    END IF;
    UPDATE ops x SET started_at = NULL FROM lanes l
      WHERE l.id = r.lane AND x.lane = l.id AND x.seq > l.head AND x.seq <= r.upto AND x.started_at IS NOT NULL;
    PERFORM lane_requeue(r.lane);
  END LOOP;
  IF v_keys IS NOT NULL THEN PERFORM turns_next(v_keys); END IF;
  RETURN v_n;
END $$;

-- Ends a process that has not been heard of: its leases are void from here on. One per call, so that the lanes' locks
-- are taken in order.
CREATE OR REPLACE FUNCTION recover() RETURNS TABLE (worker uuid, name text, lanes int)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  w record;
BEGIN
  PERFORM pause_guard();
  FOR w IN SELECT x.id, x.name FROM workers x WHERE x.until < t ORDER BY x.until LIMIT 1 FOR UPDATE SKIP LOCKED LOOP
    worker := w.id; name := w.name;
    lanes := leases_return((SELECT coalesce(array_agg(l.fence), '{}') FROM leases l WHERE l.worker = w.id), true);
    PERFORM worker_forget(w.id);
    RETURN NEXT;
  END LOOP;
END $$;

CREATE OR REPLACE FUNCTION worker_forget(p_worker uuid) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  -- Before what it holds, in the order of everyone who changes that: otherwise two processes deadlock, or a permit is
  -- left behind.
  PERFORM FROM workers x WHERE x.id = p_worker FOR UPDATE;
  -- What was left to this process alone is for all again.
  UPDATE ready x SET type = split_part(x.type, ' ', 1)
    WHERE x.type IN (SELECT jsonb_object_keys(w.announced) FROM workers w WHERE w.id = p_worker)
      AND NOT EXISTS (SELECT FROM workers w WHERE w.id <> p_worker AND w.announced ? x.type);
  WITH gone AS (DELETE FROM tallies x WHERE x.worker = p_worker RETURNING x.type, x.n)
  INSERT INTO tallies (worker, part, type, n)
    SELECT '00000000-0000-0000-0000-000000000000', -1, g.type, sum(g.n) FROM gone g GROUP BY g.type
      HAVING sum(g.n) <> 0;
  DELETE FROM connections x WHERE x.worker = p_worker;
  DELETE FROM connection_writers x WHERE x.worker = p_worker;
  DELETE FROM workers x WHERE x.id = p_worker;
END $$;

-- A process that stops by itself: what it still holds was not run and is not charged.
CREATE OR REPLACE FUNCTION retire(p_worker uuid) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  v_n int;
BEGIN
  PERFORM FROM workers x WHERE x.id = p_worker FOR UPDATE;
  v_n := leases_return((SELECT coalesce(array_agg(l.fence), '{}') FROM leases l WHERE l.worker = p_worker), false);
  PERFORM worker_forget(p_worker);
  RETURN v_n;
END $$;

-- Leases that this process does not know of: it claimed them, but the answer never reached it. Younger ones may
-- belong to a call that is still under way; no call lasts that long.
CREATE OR REPLACE FUNCTION disown(p_worker uuid, p_known bigint[]) RETURNS int
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT leases_return((SELECT coalesce(array_agg(l.fence), '{}') FROM leases l
    WHERE l.worker = p_worker AND NOT l.fence = ANY (p_known) AND l.claimed_at < clock() - interval '12 seconds'),
    false)
$$;
