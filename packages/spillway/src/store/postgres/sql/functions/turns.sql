-- Turns of keys: who may start (tables/0009-turns.sql).

-- A step of accept. Takes permits for the new lanes of a flush, in order, and parks those that get none: they wait for
-- their turn, or for their delay. Per lane: whether it was parked, and if so how many wait before it; and whether it
-- may run at once (p_running: if it gets a permit).
CREATE OR REPLACE FUNCTION turns_take(
  p_lanes uuid[], p_queues text[], p_partitions text[], p_keys uuid[], p_most int[], p_lane int[], p_delay_ms bigint[],
  p_running int[], p_at timestamptz,
  OUT waits boolean[], OUT ahead bigint[], OUT running int[]
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_keys uuid[]; v_free bigint[]; v_before bigint[];
BEGIN
  -- The last of a flush says how many may run.
  INSERT INTO turns AS k (key, queue, partition, most, lanes)
    SELECT u.key, min(u.queue), min(u.partition), (array_agg(u.most ORDER BY u.i DESC))[1], count(*)
    FROM unnest(p_keys, p_queues, p_partitions, p_most) WITH ORDINALITY u(key, queue, partition, most, i)
    WHERE u.key IS NOT NULL GROUP BY u.key ORDER BY u.key
    ON CONFLICT (key) DO UPDATE SET most = excluded.most, lanes = k.lanes + excluded.lanes;
  -- A statement of its own: what is read now stays so until we commit.
  SELECT array_agg(k.key), array_agg(CASE
      WHEN EXISTS (SELECT FROM parked x WHERE x.key = k.key AND x.reason = 'turn') THEN 0
      ELSE greatest(0, k.most - k.running) END),
      array_agg(greatest(0, k.lanes - k.running - (SELECT count(*) FROM unnest(p_keys) y(key) WHERE y.key = k.key)))
    INTO v_keys, v_free, v_before FROM turns k WHERE k.key = ANY (p_keys);
  SELECT array_agg(x.key IS NOT NULL AND NOT x.starts ORDER BY x.i),
      array_agg(v_before[x.nr] + x.rn - 1 - least(x.wanted, v_free[x.nr]) ORDER BY x.i)
    INTO waits, ahead FROM (
      SELECT u.i, u.key, array_position(v_keys, u.key) AS nr,
        row_number() OVER (PARTITION BY u.key ORDER BY u.i) AS rn,
        count(*) FILTER (WHERE d.delay = 0) OVER (PARTITION BY u.key) AS wanted,
        d.delay = 0 AND count(*) FILTER (WHERE d.delay = 0) OVER (PARTITION BY u.key ORDER BY u.i)
          <= v_free[array_position(v_keys, u.key)] AS starts
      FROM unnest(p_keys) WITH ORDINALITY u(key, i)
      JOIN unnest(p_lane, p_delay_ms) d(lane, delay) ON d.lane = u.i AND u.key IS NOT NULL
      UNION ALL
      SELECT u.i, NULL, NULL, NULL, NULL, NULL FROM unnest(p_keys) WITH ORDINALITY u(key, i) WHERE u.key IS NULL
    ) x;
  INSERT INTO parked (lane, until, reason, key, turn)
    SELECT l.id, CASE WHEN d.delay > 0 THEN p_at + d.delay * interval '1 ms' ELSE 'infinity' END,
      CASE WHEN d.delay > 0 THEN 'delay' ELSE 'turn' END, l.key, l.turn
    FROM unnest(p_lane, p_delay_ms) d(lane, delay) JOIN lanes l ON l.id = p_lanes[d.lane] WHERE waits[d.lane];
  UPDATE turns k SET running = k.running + g.n FROM (
      SELECT u.key, count(*) AS n FROM unnest(p_keys, waits) u(key, waits) WHERE NOT u.waits AND u.key IS NOT NULL
      GROUP BY u.key) g
    WHERE k.key = g.key;
  running := ARRAY(SELECT CASE WHEN u.waits THEN 0 ELSE u.running END FROM unnest(p_running, waits) u(running, waits));
END $$;

-- Locks the keys of these lanes, whose locks the caller holds. False: none has a key.
CREATE OR REPLACE FUNCTION turns_lock(p_lanes uuid[]) RETURNS boolean
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM FROM turns k WHERE k.key IN (SELECT l.key FROM lanes l WHERE l.id = ANY (p_lanes)) ORDER BY k.key FOR UPDATE;
  RETURN FOUND;
END $$;

-- A step of settle. These lanes had permits; those that were parked or have emptied give them back. The keys are
-- locked.
CREATE OR REPLACE FUNCTION turns_return(p_lanes uuid[]) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_keys uuid[];
BEGIN
  WITH aside AS (
    UPDATE parked x SET key = l.key, turn = l.turn FROM lanes l
      WHERE l.id = ANY (p_lanes) AND l.key IS NOT NULL AND x.lane = l.id RETURNING l.key
  ), given AS (
    SELECT u.key, count(*) AS n, count(*) FILTER (WHERE u.left) AS left FROM (
      SELECT a.key, false AS left FROM aside a
      UNION ALL SELECT l.key, true FROM lanes l
        WHERE l.id = ANY (p_lanes) AND l.key IS NOT NULL AND l.depth = 0
    ) u GROUP BY u.key
  ), done AS (
    UPDATE turns k SET running = k.running - g.n, lanes = k.lanes - g.left FROM given g WHERE k.key = g.key
      RETURNING k.key
  ) SELECT array_agg(d.key) INTO v_keys FROM done d;
  PERFORM turns_next(v_keys);
END $$;

-- Passes free permits of these keys, which the caller has locked, on to the first lanes that wait. A key without lanes
-- goes. Returns how many lanes became ready.
CREATE OR REPLACE FUNCTION turns_next(p_keys uuid[]) RETURNS int
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_n int;
BEGIN
  WITH first AS (
    SELECT w.lane FROM turns k, LATERAL (
      SELECT x.lane FROM parked x WHERE x.key = k.key AND x.reason = 'turn' ORDER BY x.turn
      LIMIT greatest(0, k.most - k.running)) w
    WHERE k.key = ANY (p_keys) AND k.running < k.most
  ), gone AS (
    DELETE FROM parked x USING first f WHERE x.lane = f.lane RETURNING x.lane, x.key
  ), readied AS (
    INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
      SELECT l.id, o.priority, o.stamp, o.type, l.head, l.depth, l.careful > l.head, l.queue, l.partition
      FROM gone g JOIN lanes l ON l.id = g.lane,
        LATERAL (SELECT y.priority, y.stamp, y.type FROM ops y WHERE y.lane = l.id AND y.seq > l.head
          ORDER BY y.seq LIMIT 1) o
      RETURNING 1
  ), counted AS (
    UPDATE turns k SET running = k.running + c.n
      FROM (SELECT g.key, count(*) AS n FROM gone g GROUP BY g.key) c WHERE k.key = c.key RETURNING 1
  )
  SELECT count(*) INTO v_n FROM readied;
  DELETE FROM turns k WHERE k.key = ANY (p_keys) AND k.lanes = 0;
  RETURN v_n;
END $$;

-- A step of promote. Lanes whose time has come wait for their turn. Claiming may hold other keys already, so it must
-- not wait for one: a key that is in use has its turn at the next claim.
CREATE OR REPLACE FUNCTION turns_promote(p_most int, p_at timestamptz) RETURNS int
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_keys uuid[];
BEGIN
  v_keys := ARRAY(SELECT k.key FROM turns k WHERE k.key IN (
      SELECT x.key FROM parked x WHERE x.until <= p_at AND x.key IS NOT NULL ORDER BY x.until LIMIT p_most)
    FOR UPDATE SKIP LOCKED);
  IF cardinality(v_keys) = 0 THEN RETURN 0; END IF;
  UPDATE parked x SET until = 'infinity', reason = 'turn' WHERE x.until <= p_at AND x.key = ANY (v_keys);
  RETURN turns_next(v_keys);
END $$;

-- What must hold between transactions; see audit.
CREATE OR REPLACE FUNCTION turns_audit() RETURNS TABLE (fault text)
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  WITH held AS (
    SELECT r.lane FROM ready r UNION ALL SELECT unnest(z.lanes) FROM leases z
  ), counted AS (
    SELECT l.key, count(*) AS lanes, count(h.lane) AS running FROM lanes l LEFT JOIN held h ON h.lane = l.id
    WHERE l.key IS NOT NULL GROUP BY l.key
  )
  SELECT format('key %s has %s lanes, %s of them running, but says %s and %s', coalesce(k.key, c.key), c.lanes,
      c.running, k.lanes, k.running)
    FROM turns k FULL JOIN counted c ON c.key = k.key
    WHERE (k.lanes, k.running::bigint) IS DISTINCT FROM (c.lanes, c.running)
  UNION ALL SELECT format('lane %s waits for its turn although key %s has a permit', x.lane, k.key)
    FROM turns k JOIN parked x ON x.key = k.key AND x.reason = 'turn' WHERE k.running < k.most
  UNION ALL SELECT format('lane %s is parked with another key or turn than its own', x.lane)
    FROM parked x JOIN lanes l ON l.id = x.lane WHERE (x.key, x.turn) IS DISTINCT FROM (l.key, l.turn)
$$;
