-- Lanes: how items are appended to them, and where a lane waits: ready, or parked by a delay, a pause or its turn.
--
-- lanes_count, lanes_append, lanes_take and lanes_start are steps of accept and run with its settings.

-- How many undecided items each lane gets. The lanes that get any, in the given order; per item its number among these
-- lanes and its number in the lane (0: it is decided, and gets none). may_run: may the lane's first item run at once?
CREATE OR REPLACE FUNCTION lanes_count(
  p_lanes uuid[], p_queues text[], p_partitions text[], p_lane int[], p_reason text[], p_decided text[],
  OUT ids uuid[], OUT queues text[], OUT partitions text[], OUT counts bigint[], OUT may_run boolean[],
  OUT lane int[], OUT rn bigint[]
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_kept int[];
BEGIN
  SELECT array_agg(coalesce(x.rn, 0) ORDER BY x.i) INTO rn FROM (
    SELECT u.i, CASE WHEN u.decided IS NULL
        THEN row_number() OVER (PARTITION BY u.lane, u.decided IS NULL ORDER BY u.i) END AS rn
    FROM unnest(p_lane, p_decided) WITH ORDINALITY u(lane, decided, i)) x;
  SELECT array_agg(x.lane), array_agg(x.n), array_agg(x.may_run) INTO v_kept, counts, may_run FROM (
    SELECT u.lane, max(u.rn) AS n,
      bool_or(u.rn = 1 AND u.reason IN ('', '+requested', '+still_running')) AS may_run
    FROM unnest(p_lane, rn, p_reason) u(lane, rn, reason) WHERE u.rn > 0 GROUP BY u.lane ORDER BY u.lane) x;
  SELECT array_agg(p_lanes[u.k]), array_agg(p_queues[u.k]), array_agg(p_partitions[u.k]) INTO ids, queues, partitions
    FROM unnest(v_kept) u(k);
  SELECT array_agg(CASE WHEN u.rn > 0 THEN array_position(v_kept, u.lane) ELSE 0 END) INTO lane
    FROM unnest(p_lane, rn) u(lane, rn);
END $$;

-- Appends to the lanes, in id order: sequences are given here, under the lane's lock. p_may_run: an empty lane starts
-- at once; where p_apply, head moves with tail. running: 1 if the first operation is known to run.
CREATE OR REPLACE FUNCTION lanes_append(
  p_ids uuid[], p_queues text[], p_partitions text[], p_counts bigint[], p_may_run boolean[], p_apply boolean,
  p_at timestamptz,
  OUT tails bigint[], OUT depths bigint[], OUT running int[], OUT paces real[], OUT blocked bigint[]
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  WITH up AS (
    INSERT INTO lanes AS l (id, queue, partition, head, tail, depth, running, moved_at, sweep_at)
    SELECT u.id, u.queue, u.partition, CASE WHEN p_apply AND u.may_run THEN u.n ELSE 0 END, u.n,
      CASE WHEN p_apply AND u.may_run THEN 0 ELSE u.n END, NOT p_apply AND u.may_run, p_at, p_at + interval '1 hour'
    FROM unnest(p_ids, p_queues, p_partitions, p_counts, p_may_run) u(id, queue, partition, n, may_run)
    ON CONFLICT (id) DO UPDATE SET
      tail = l.tail + excluded.tail,
      -- excluded.head says that these may be applied at once.
      head = CASE WHEN excluded.head > 0 AND l.depth = 0 THEN l.tail + excluded.tail ELSE l.head END,
      depth = CASE WHEN excluded.head > 0 AND l.depth = 0 THEN 0 ELSE l.depth + excluded.tail END,
      running = CASE WHEN l.depth = 0 THEN excluded.running ELSE l.running END,
      moved_at = CASE WHEN l.depth = 0 THEN p_at ELSE l.moved_at END
    RETURNING l.tail, l.depth, l.running, l.pace_ms,
      -- How long its head is delayed or waits for its next attempt. How long a pause lasts is unknown.
      CASE WHEN l.depth > 1 AND NOT l.running
        THEN (SELECT (date_part('epoch', x.until - p_at) * 1000)::bigint FROM parked x
          WHERE x.lane = l.id AND x.reason <> 'pause') END AS blocked_ms
  )
  SELECT array_agg(up.tail), array_agg(up.depth), array_agg(up.running::int), array_agg(coalesce(up.pace_ms, -1)),
      array_agg(up.blocked_ms)
    INTO tails, depths, running, paces, blocked FROM up;
END $$;

-- The same for a flush with parallel operations. A function of its own: the three columns cost others 1% of a flush.
-- p_alone: the lane is one parallel operation's; p_turn_keys: and has this key. What is parallel and applied at once
-- needs no lane.
CREATE OR REPLACE FUNCTION lanes_take(
  p_ids uuid[], p_queues text[], p_partitions text[], p_counts bigint[], p_may_run boolean[], p_alone boolean[],
  p_turn_keys uuid[], p_apply boolean, p_at timestamptz,
  OUT tails bigint[], OUT depths bigint[], OUT running int[], OUT paces real[], OUT blocked bigint[]
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  IF p_apply AND true = ALL (p_alone || p_may_run) AND cardinality(p_alone) = cardinality(p_ids) THEN
    tails := p_counts; depths := array_fill(0::bigint, ARRAY[cardinality(p_ids)]);
    running := array_fill(0, ARRAY[cardinality(p_ids)]); paces := array_fill(-1::real, ARRAY[cardinality(p_ids)]);
    RETURN;
  END IF;
  WITH up AS (
    INSERT INTO lanes AS l (id, queue, partition, head, tail, depth, running, moved_at, sweep_at, alone, key, turn)
    SELECT u.id, u.queue, u.partition, CASE WHEN p_apply AND u.may_run THEN u.n ELSE 0 END, u.n,
      CASE WHEN p_apply AND u.may_run THEN 0 ELSE u.n END, NOT p_apply AND u.may_run, p_at, p_at + interval '1 hour',
      coalesce(u.alone, false), u.key, CASE WHEN u.key IS NOT NULL THEN nextval('turn_numbers') END
    FROM unnest(p_ids, p_queues, p_partitions, p_counts, p_may_run, p_alone, p_turn_keys)
      u(id, queue, partition, n, may_run, alone, key)
    ON CONFLICT (id) DO UPDATE SET
      tail = l.tail + excluded.tail,
      -- excluded.head says that these may be applied at once.
      head = CASE WHEN excluded.head > 0 AND l.depth = 0 THEN l.tail + excluded.tail ELSE l.head END,
      depth = CASE WHEN excluded.head > 0 AND l.depth = 0 THEN 0 ELSE l.depth + excluded.tail END,
      running = CASE WHEN l.depth = 0 THEN excluded.running ELSE l.running END,
      moved_at = CASE WHEN l.depth = 0 THEN p_at ELSE l.moved_at END
    RETURNING l.tail, l.depth, l.running, l.pace_ms,
      -- How long its head is delayed or waits for its next attempt. How long a pause lasts is unknown.
      CASE WHEN l.depth > 1 AND NOT l.running
        THEN (SELECT (date_part('epoch', x.until - p_at) * 1000)::bigint FROM parked x
          WHERE x.lane = l.id AND x.reason <> 'pause') END AS blocked_ms
  )
  SELECT array_agg(up.tail), array_agg(up.depth), array_agg(up.running::int), array_agg(coalesce(up.pace_ms, -1)),
      array_agg(up.blocked_ms)
    INTO tails, depths, running, paces, blocked FROM up;
  IF p_apply AND cardinality(p_alone) > 0 THEN PERFORM lanes_drop(p_ids); END IF;
END $$;

-- What was given per lane of p_from, for the lanes of p_to. Empty stays empty.
CREATE OR REPLACE FUNCTION lanes_pick(
  p_from uuid[], p_to uuid[], p_alone boolean[], p_keys uuid[], p_most int[],
  OUT alone boolean[], OUT keys uuid[], OUT most int[]
)
  LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN cardinality(p_alone) > 0 THEN array_agg(p_alone[u.at] ORDER BY u.i) ELSE p_alone END,
    CASE WHEN cardinality(p_keys) > 0 THEN array_agg(p_keys[u.at] ORDER BY u.i) ELSE p_keys END,
    CASE WHEN cardinality(p_most) > 0 THEN array_agg(p_most[u.at] ORDER BY u.i) ELSE p_most END
  FROM (SELECT x.i, array_position(p_from, x.id) AS at FROM unnest(p_to) WITH ORDINALITY x(id, i)) u
$$;

-- Removes the lanes of parallel operations that have left. The caller holds their locks.
CREATE OR REPLACE FUNCTION lanes_drop(p_ids uuid[]) RETURNS void
  LANGUAGE sql AS $$
  DELETE FROM lanes l WHERE l.id = ANY (p_ids) AND l.alone AND l.depth = 0
$$;

-- Puts the lanes that were empty where they belong. They were empty, so no operation in them is suspected of a crash.
-- p_parked: they are parked already.
CREATE OR REPLACE FUNCTION lanes_start(
  p_ids uuid[], p_queues text[], p_partitions text[], p_counts bigint[], p_depths bigint[],
  p_lane int[], p_rn bigint[], p_verdicts text[], p_priority smallint[], p_stamps bigint[], p_delay_ms bigint[],
  p_type text[], p_seqs bigint[], p_parked boolean[], p_at timestamptz
) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
    SELECT p_ids[u.lane], u.priority, u.stamp, u.type, u.seq - 1, p_depths[u.lane], false, p_queues[u.lane],
      p_partitions[u.lane]
    FROM unnest(p_lane, p_rn, p_verdicts, p_priority, p_stamps, p_delay_ms, p_type, p_seqs)
      u(lane, rn, verdict, priority, stamp, delay_ms, type, seq)
    WHERE u.rn = 1 AND u.verdict = 'queue' AND u.delay_ms = 0 AND p_depths[u.lane] = p_counts[u.lane]
      AND p_parked[u.lane] IS NOT TRUE;
  IF 0 < ANY (p_delay_ms) THEN
    INSERT INTO parked (lane, until, reason)
      SELECT p_ids[u.lane], p_at + u.delay_ms * interval '1 ms', 'delay'
      FROM unnest(p_lane, p_rn, p_verdicts, p_delay_ms) u(lane, rn, verdict, delay_ms)
      WHERE u.rn = 1 AND u.verdict = 'queue' AND u.delay_ms > 0 AND p_depths[u.lane] = p_counts[u.lane]
        AND p_parked[u.lane] IS NOT TRUE;
  END IF;
END $$;

-- Refuses what would have to wait, with all of its batch, because nothing more may wait. Takes no locks, which would
-- come before those of the rates: a lane that fills up at this moment takes one more.
CREATE OR REPLACE FUNCTION depth_check(
  p_batch int[], p_lane int[], p_reason text[], p_decided text[], p_lanes uuid[], p_queues text[], p_partitions text[],
  p_type text
) RETURNS text[]
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  RETURN (
    WITH waiting AS (
      SELECT DISTINCT u.batch FROM unnest(p_batch, p_lane, p_reason, p_decided) u(batch, lane, reason, decided)
      WHERE u.decided IS NULL AND (u.reason <> ''
        OR EXISTS (SELECT FROM lanes l WHERE l.id = p_lanes[u.lane] AND l.depth > 0)
        OR EXISTS (SELECT FROM pauses s WHERE CASE WHEN s.queue = '' THEN s.partition = p_type
          ELSE s.queue = p_queues[u.lane] AND (s.partition IS NULL OR s.partition = p_partitions[u.lane]) END))
    )
    SELECT array_agg(coalesce(u.decided, CASE WHEN u.batch IN (SELECT w.batch FROM waiting w) THEN 'depth_full' END))
    FROM unnest(p_batch, p_decided) u(batch, decided));
END $$;

-- Puts a lane that has operations where it belongs. The caller holds its lock, and it is nowhere else. A lane with a
-- key waits for its turn: the caller holds the key's lock too, has given the lane's permit back, and calls turns_next.
CREATE OR REPLACE FUNCTION lane_requeue(p_lane uuid) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  o record;
BEGIN
  SELECT x.priority, x.stamp, x.type, x.not_before, l.head, l.depth, l.careful > l.head AS careful, l.queue,
    l.partition, l.key, l.turn INTO o FROM lanes l, ops x
    WHERE l.id = p_lane AND x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1;
  IF NOT FOUND THEN
    RETURN;
  ELSIF lane_paused(p_lane) THEN
    INSERT INTO parked (lane, until, reason, key, turn) VALUES (p_lane, 'infinity', 'pause', o.key, o.turn);
  ELSIF o.not_before > t THEN
    INSERT INTO parked (lane, until, reason, key, turn) VALUES (p_lane, o.not_before, 'delay', o.key, o.turn);
  ELSIF o.key IS NOT NULL THEN
    INSERT INTO parked (lane, until, reason, key, turn) VALUES (p_lane, 'infinity', 'turn', o.key, o.turn);
  ELSE
    INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
      VALUES (p_lane, o.priority, o.stamp, o.type, o.head, o.depth, o.careful, o.queue, o.partition);
  END IF;
END $$;
