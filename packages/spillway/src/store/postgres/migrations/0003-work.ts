/**
 * `step`: settles what a process has finished and claims what it may run next, in one call. `mark` tells which
 * operations run long. `pulse` is the heartbeat. `recover` gives the lanes of a dead process back.
 *
 * Settling (per lane, sorted by id): everything up to `s_head` leaves the lane; `s_retry_ms` puts the next one back with a delay;
 * `s_release` gives the lane up. A settlement whose lease row is gone, or whose lane is not in it, is refused as a whole: the fence.
 *
 * Counting deliveries after a crash: a claim hands out several operations, and only one of a lane can have killed the
 * process. The first one is charged when it surely ran, that is when its start was told (`mark`). Otherwise nobody is,
 * and the lane is claimed one operation at a time (`careful`), each told before it runs, until the suspects are through:
 * what kills its process every time ends as a dead letter, and its neighbours are not charged for it.
 *
 * Plans: the joins go from the small arrays to an index each time; hash joins and sequential scans over small tables that churn lose by
 * a third (measured) and are off inside these functions. Nested loops from the sorted arrays also keep the lock order.
 */
export const work = {
  version: 3,
  name: 'work',
  sql: `
-- Takes what settling these lanes will take, in the same order, before the effects are written: those may lock what comes
-- behind it in the lock order (the ledger's head is last). Per lane: false when the lease is lost.
CREATE FUNCTION settle_hold(p_worker uuid, p_fences bigint[], p_lanes uuid[], p_keys uuid[]) RETURNS boolean[] LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  PERFORM pause_guard();
  PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
  IF NOT FOUND THEN RETURN array_fill(false, ARRAY[cardinality(p_lanes)]); END IF;
  PERFORM FROM leases l WHERE l.fence = ANY (p_fences) AND l.worker = p_worker ORDER BY l.fence FOR UPDATE;
  IF cardinality(p_keys) > 0 THEN PERFORM FROM idempotency d WHERE d.key = ANY (p_keys) ORDER BY d.key FOR UPDATE; END IF;
  PERFORM FROM lanes l WHERE l.id = ANY (p_lanes) ORDER BY l.id FOR UPDATE;
  RETURN (SELECT array_agg(EXISTS (SELECT FROM leases l WHERE l.fence = u.fence AND l.worker = p_worker AND u.lane = ANY (l.lanes)) ORDER BY u.i)
    FROM unnest(p_fences, p_lanes) WITH ORDINALITY u(fence, lane, i));
END $$;

CREATE FUNCTION settle(
  p_worker uuid, p_part smallint,
  s_fence bigint[], s_lane uuid[], s_from bigint[], s_head bigint[], s_left bigint[], s_release boolean[], s_retry_ms bigint[], s_retry_error text[], s_ago_ms bigint[],
  p_types text[], p_type_counts bigint[],    -- how many leave, per type
  p_gates text[], p_gate_counts bigint[],
  r_lane uuid[], r_seq bigint[], r_status text[], r_result text[], r_error text[], r_ago_ms bigint[], r_counted boolean[],
  r_key uuid[], r_answer text[],             -- what their idempotency keys shall answer; empty when none has one
  s_leave text[]                             -- label of those that the next operation is left to; NULL when none is left
) RETURNS bigint[] LANGUAGE plpgsql
  SET search_path FROM CURRENT SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_lost bigint[];
  v_gone bigint;
  v_queues text[]; v_partitions text[]; v_heads bigint[]; v_depths bigint[]; v_careful boolean[];
  v_more boolean; v_emptied boolean; v_levels bigint[];
  v_release boolean[] := s_release;
  v_leave text[];
  v_k int;
  v_paused boolean := pause_guard();
BEGIN
  -- Before everything else: whoever gives this process up takes the same lock first.
  PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
  IF NOT FOUND THEN
    RETURN (SELECT array_agg(DISTINCT x) FROM unnest(s_fence) x);
  END IF;
  IF s_leave IS NOT NULL THEN
    -- The process that removes the last of them waits for us, and then finds the label that we set (worker_forget).
    PERFORM FROM workers w WHERE w.announced ?| s_leave ORDER BY w.id FOR KEY SHARE;
    v_leave := ARRAY(SELECT CASE WHEN EXISTS (SELECT FROM workers w WHERE w.announced ? u.label) THEN u.label END
      FROM unnest(s_leave) WITH ORDINALITY u(label, i) ORDER BY u.i);
  END IF;
  -- The fence: every lease named must be there, be ours, and still hold the lane. All or nothing per call; the caller
  -- drops what is lost and comes again with the rest.
  SELECT array_agg(u.fence) INTO v_lost FROM (
    SELECT s.fence, array_agg(s.lane ORDER BY s.lane) AS lanes FROM unnest(s_fence, s_lane) s(fence, lane) GROUP BY s.fence ORDER BY s.fence
  ) u LEFT JOIN LATERAL (
    SELECT l.lanes FROM leases l WHERE l.fence = u.fence AND l.worker = p_worker FOR UPDATE
  ) l ON true
  -- Most settle a claim as a whole, and equality is told in one pass; containment compares each with each.
  WHERE l.lanes IS NULL OR NOT (u.lanes = l.lanes OR u.lanes <@ l.lanes);
  IF v_lost IS NOT NULL THEN
    RETURN v_lost;
  END IF;

  IF cardinality(r_key) > 0 THEN
    -- Only while the row is this operation's: an expired key may belong to a later request by now.
    UPDATE idempotency d SET answer = u.answer::json
      FROM (SELECT x.key, x.answer, o.id FROM unnest(r_lane, r_seq, r_key, r_answer) x(lane, seq, key, answer) JOIN ops o ON o.lane = x.lane AND o.seq = x.seq
            WHERE x.key IS NOT NULL ORDER BY x.key OFFSET 0) u
      WHERE d.key = u.key AND d.op = u.id AND d.answer IS NULL;
  END IF;
  IF cardinality(p_gates) > 0 THEN
    PERFORM gates_release(p_gates, p_gate_counts);
  END IF;

  -- The lanes move on, in id order (s_lane is sorted, and the names stand in its order). In a statement of their own:
  -- what is read of them from here on is as it stays until we commit.
  WITH moved AS (
    UPDATE lanes l SET
      head = greatest(l.head, u.head), depth = l.depth - u.gone,
      running = false, moved_at = CASE WHEN u.gone > 0 THEN t ELSE l.moved_at END,
      pace_ms = CASE WHEN u.gone = 0 THEN l.pace_ms ELSE
        coalesce(l.pace_ms * 0.7, 0) + (CASE WHEN l.pace_ms IS NULL THEN 1 ELSE 0.3 END)
          * least(date_part('epoch', t - l.moved_at) * 1000 / u.gone, 3.6e6) END
    FROM unnest(s_lane, s_head, s_left) u(lane, head, gone)
    WHERE l.id = u.lane
    RETURNING l.queue, l.partition, l.head, l.depth, l.careful > l.head AS careful
  )
  SELECT array_agg(m.queue), array_agg(m.partition), array_agg(m.head), array_agg(m.depth), array_agg(m.careful), bool_or(m.depth > 0), bool_or(m.depth = 0)
    INTO v_queues, v_partitions, v_heads, v_depths, v_careful, v_more, v_emptied FROM moved m;

  -- What failed and comes again keeps its place.
  IF EXISTS (SELECT FROM unnest(s_retry_ms) x WHERE x IS NOT NULL) THEN
    UPDATE ops o SET attempts = o.attempts + CASE WHEN u.error IS NULL THEN 0 ELSE 1 END, error = coalesce(u.error, o.error), started_at = NULL,
        not_before = CASE WHEN u.label IS NULL THEN t + u.retry_ms * interval '1 ms' END
      FROM (
        SELECT x.lane, n.seq, x.retry_ms, x.error, x.label FROM unnest(s_lane, s_head, s_retry_ms, s_retry_error, v_leave) x(lane, head, retry_ms, error, label),
          LATERAL (SELECT y.seq FROM ops y WHERE y.lane = x.lane AND y.seq > x.head ORDER BY y.seq LIMIT 1) n
        WHERE x.retry_ms IS NOT NULL OFFSET 0
      ) u WHERE o.lane = u.lane AND o.seq = u.seq;
  END IF;

  -- The next operation says where a lane that is given up goes.
  IF v_more THEN
    -- Not before those who wait: an identity whose lanes are all out lags behind what was claimed of others, and a newcomer, who begins
    -- where that is, would have to wait until it has caught up.
    v_levels := ARRAY(SELECT (SELECT x.stamp FROM ready x WHERE x.priority = p ORDER BY x.stamp LIMIT 1) FROM generate_series(1, 10) p);
    WITH next AS (
      SELECT u.lane, CASE WHEN u.label IS NULL THEN u.retry_ms END AS retry_ms, u.queue, u.partition, u.head, u.depth, u.careful, o.seq, o.priority, o.stamp AS was,
        greatest(o.stamp, v_levels[o.priority] + 1) AS stamp, coalesce(u.label, o.type) AS type,
        o.not_before, v_paused AND EXISTS (SELECT FROM pauses p WHERE CASE WHEN p.queue = '' THEN p.partition = o.type
          ELSE p.queue = u.queue AND (p.partition IS NULL OR p.partition = u.partition) END) AS paused
      FROM unnest(s_lane, s_release, s_retry_ms, v_queues, v_partitions, v_heads, v_depths, v_careful, v_leave) u(lane, release, retry_ms, queue, partition, head, depth, careful, label),
        LATERAL (SELECT x.seq, x.priority, x.stamp, x.type, x.not_before FROM ops x WHERE x.lane = u.lane AND x.seq > u.head ORDER BY x.seq LIMIT 1) o
      WHERE u.release AND u.depth > 0
    ), lifted AS (
      UPDATE ops o SET stamp = n.stamp FROM next n WHERE n.stamp > n.was AND o.lane = n.lane AND o.seq = n.seq
    ), put_aside AS (
      INSERT INTO parked (lane, until, reason)
      SELECT n.lane, CASE WHEN n.paused THEN 'infinity'::timestamptz WHEN n.retry_ms IS NOT NULL THEN t + n.retry_ms * interval '1 ms' ELSE n.not_before END,
        CASE WHEN n.paused THEN 'pause' WHEN n.retry_ms IS NOT NULL THEN 'retry' ELSE 'delay' END
      FROM next n
      WHERE n.paused OR n.retry_ms IS NOT NULL OR n.not_before > t
    )
    INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
    SELECT n.lane, n.priority, n.stamp, n.type, n.head, n.depth, n.careful, n.queue, n.partition FROM next n
    WHERE NOT n.paused AND n.retry_ms IS NULL AND (n.not_before IS NULL OR n.not_before <= t);
  END IF;
  -- One that is empty is nobody's, asked or not.
  IF v_emptied THEN
    SELECT array_agg(u.release OR u.depth = 0) INTO v_release FROM unnest(s_release, v_depths) u(release, depth);
  END IF;

  -- What is done leaves the hot table at once.
  IF cardinality(r_lane) = 0 THEN
    WITH gone AS (
      -- From one source, or the range is not used for the index: with lanes joined in, whole lanes were read.
      DELETE FROM ops o USING unnest(s_lane, s_from, s_head, s_ago_ms, v_queues, v_partitions) u(lane, base, head, ago, queue, partition)
      WHERE o.lane = u.lane AND o.seq > u.base AND o.seq <= u.head
      RETURNING o.id, o.type, o.priority, o.identity, o.accepted_at, o.attempts, o.max_attempts, o.trace, u.queue, u.partition, u.ago
    ), kept AS (
      INSERT INTO history (id, finished_at, status, type, queue, partition, priority, identity, accepted_at, started_at, attempts, max_attempts, error, trace)
      SELECT g.id, t, 'completed', g.type, g.queue, g.partition, g.priority, g.identity, g.accepted_at, t - g.ago * interval '1 ms', g.attempts + 1, g.max_attempts, NULL, g.trace
      FROM gone g
      RETURNING 1
    )
    SELECT count(*) INTO v_gone FROM kept;
  ELSE
    WITH gone AS (
      DELETE FROM ops o USING unnest(r_lane, r_seq, r_status, r_result, r_error, r_ago_ms, r_counted) u(lane, seq, status, result, error, ago, counted)
      WHERE o.lane = u.lane AND o.seq = u.seq
      RETURNING o.*, u.status, u.result AS told, u.error AS why, u.ago, u.counted
    ), kept AS (
      INSERT INTO history (id, finished_at, status, type, queue, partition, priority, identity, accepted_at, started_at, attempts, max_attempts, error, result, trace)
      SELECT g.id, t, g.status, g.type, l.queue, l.partition, g.priority, g.identity, g.accepted_at,
        CASE WHEN g.counted THEN t - g.ago * interval '1 ms' END, g.attempts + g.counted::int, g.max_attempts, g.why, g.told::json, g.trace
      FROM gone g JOIN lanes l ON l.id = g.lane WHERE g.status <> 'failed'
      RETURNING 1
    ), died AS (
      INSERT INTO dead_letters (id, died_at, lane, seq, queue, partition, type, priority, identity, payload, accepted_at, started_at, attempts, max_attempts, timeout_ms, error, result, trace, gate)
      SELECT g.id, t, g.lane, g.seq, l.queue, l.partition, g.type, g.priority, g.identity, g.payload, g.accepted_at,
        CASE WHEN g.counted THEN t - g.ago * interval '1 ms' END, g.attempts + g.counted::int, g.max_attempts, g.timeout_ms, g.why, g.told::json, g.trace, g.gate
      FROM gone g JOIN lanes l ON l.id = g.lane WHERE g.status = 'failed'
      RETURNING 1
    )
    SELECT (SELECT count(*) FROM kept) + (SELECT count(*) FROM died) INTO v_gone;
  END IF;
  IF v_gone IS DISTINCT FROM (SELECT coalesce(sum(x), 0) FROM unnest(s_left) x) THEN
    RAISE EXCEPTION 'settled % operations where % were expected', v_gone, (SELECT sum(x) FROM unnest(s_left) x) USING ERRCODE = 'XX000';
  END IF;

  -- Leases: one whose lanes are all given up goes, the others lose those that were. (All lanes named are in their
  -- leases, each once, so comparing numbers is enough.)
  DELETE FROM leases l USING (SELECT x.fence, count(*) AS n FROM unnest(s_fence, v_release) x(fence, release) WHERE x.release GROUP BY x.fence) u
    WHERE l.fence = u.fence AND cardinality(l.lanes) = u.n;
  UPDATE leases l SET lanes = k.lanes, uptos = k.uptos
    FROM (SELECT DISTINCT x.fence FROM unnest(s_fence, v_release) x(fence, release) WHERE x.release) f,
      LATERAL (
        SELECT coalesce(array_agg(z.lane), '{}') AS lanes, coalesce(array_agg(z.upto), '{}') AS uptos
        FROM leases q, unnest(q.lanes, q.uptos) z(lane, upto)
        WHERE q.fence = f.fence AND NOT EXISTS (SELECT FROM unnest(s_lane, v_release) g(lane, release) WHERE g.release AND g.lane = z.lane)
      ) k
    WHERE l.fence = f.fence;

  FOR v_k IN 1 .. cardinality(p_types) LOOP
    PERFORM tally(p_worker, p_part, p_types[v_k], - p_type_counts[v_k]);
  END LOOP;
  RETURN '{}';
END $$;

-- After a commit that was not confirmed. The transaction in question holds the lease's lock until it has ended.
CREATE FUNCTION confirm(p_worker uuid, p_fence bigint, p_lane uuid, p_seq bigint) RETURNS text LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  PERFORM FROM leases l WHERE l.fence = p_fence AND l.worker = p_worker AND p_lane = ANY (l.lanes) FOR UPDATE;
  IF NOT FOUND THEN RETURN 'lost'; END IF;
  RETURN CASE WHEN EXISTS (SELECT FROM ops o WHERE o.lane = p_lane AND o.seq = p_seq) THEN 'pending' ELSE 'left' END;
END $$;

-- Lanes whose time has come.
CREATE FUNCTION promote(p_most int) RETURNS int LANGUAGE plpgsql
  SET search_path FROM CURRENT SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_n int;
BEGIN
  IF NOT EXISTS (SELECT FROM parked p WHERE p.until <= t) THEN RETURN 0; END IF;
  WITH due AS (
    SELECT p.lane FROM parked p WHERE p.until <= t ORDER BY p.until LIMIT p_most FOR UPDATE SKIP LOCKED
  ), heads AS (
    SELECT d.lane, o.priority, o.stamp, o.type, l.head, l.depth, l.careful > l.head AS careful, l.queue, l.partition FROM due d JOIN lanes l ON l.id = d.lane,
      LATERAL (SELECT x.priority, x.stamp, x.type FROM ops x WHERE x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1) o
  ), gone AS (
    DELETE FROM parked p USING heads h WHERE p.lane = h.lane RETURNING p.lane
  ), readied AS (
    INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
      SELECT h.lane, h.priority, h.stamp, h.type, h.head, h.depth, h.careful, h.queue, h.partition FROM heads h JOIN gone g ON g.lane = h.lane RETURNING 1
  )
  SELECT count(*) INTO v_n FROM readied;
  RETURN v_n;
END $$;

-- Of these types those that have a ready lane; NULL: none has. Of all types (NULL): an empty list, if there is any lane.
CREATE FUNCTION ready_types(p_types text[]) RETURNS text[] LANGUAGE plpgsql STABLE
  SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
  IF p_types IS NULL THEN RETURN CASE WHEN EXISTS (SELECT FROM ready x) THEN '{}'::text[] END; END IF;
  RETURN (SELECT array_agg(u.type) FROM unnest(p_types) u(type) WHERE EXISTS (SELECT FROM ready x WHERE x.type = u.type));
END $$;

-- Leases up to p_want ready lanes and hands out the first operations of each, in order. p_types: only lanes whose first operation
-- is of these; NULL: all. p_together: types that are settled in one transaction each time, so that p_each does not bound them.
-- p_trusted: types that cannot end their process, and need not come one at a time. One row, with a list for each column (a row for
-- each operation costs both sides more than finding it): of lanes, then of operations, which name their lane by number; \`depth\` is
-- what the lanes held together when they became ready. Lists are texts with commas; what may hold a comma is a JSON array.
CREATE FUNCTION claim(p_worker uuid, p_want int, p_budget int, p_each int, p_turn smallint, p_types text[], p_together text[], p_trusted text[],
  OUT fence bigint, OUT depth bigint, OUT lanes text, OUT queues json, OUT partitions json, OUT careful text,
  OUT ixs text, OUT seqs text, OUT ids text, OUT types text, OUT priorities text, OUT identities json, OUT payloads text, OUT waited_ms text, OUT due text,
  OUT attempts text, OUT max_attempts text, OUT timeouts_ms text, OUT traces json, OUT idems text, OUT gates json
) LANGUAGE plpgsql
  SET search_path FROM CURRENT SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_lanes uuid[]; v_heads bigint[]; v_careful boolean[]; v_queues text[]; v_partitions text[]; v_held boolean[]; v_stamps bigint[];
  v_own text[]; v_at tid[]; v_stamp bigint; v_most int; v_types text[]; v_ixs int[]; v_seqs bigint[]; v_identities text[]; v_traces text[]; v_gates text[]; v_gated boolean;
BEGIN
  -- The lock below is a write, and a write makes the commit wait for the disk: not for finding nothing.
  v_own := ready_types(p_types);
  IF v_own IS NULL AND NOT EXISTS (SELECT FROM parked p WHERE p.until <= t) THEN RETURN; END IF;
  PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
  IF NOT FOUND THEN RETURN; END IF;
  IF promote(p_want) > 0 THEN v_own := ready_types(p_types); END IF;
  IF v_own IS NULL THEN RETURN; END IF;
  -- Strict priority, but p_turn lets a lower level go first now and then, so that no level starves.
  FOR v_turn IN REVERSE p_turn .. 1 BY greatest(1, p_turn - 1) LOOP
    -- Of one type by its own index: 10,000 lanes that others are to run would be passed by one by one, for 4 ms each time.
    v_at := CASE WHEN cardinality(v_own) = 1 THEN ARRAY(
        SELECT x.ctid FROM ready x WHERE x.type = v_own[1] AND x.priority + 0 >= v_turn ORDER BY x.priority + 0, x.stamp LIMIT p_want FOR UPDATE SKIP LOCKED)
      ELSE ARRAY(
        SELECT x.ctid FROM ready x WHERE x.priority >= v_turn AND (p_types IS NULL OR x.type = ANY (p_types)) ORDER BY x.priority, x.stamp LIMIT p_want FOR UPDATE SKIP LOCKED)
      END;
    WITH d AS (
      DELETE FROM ready x USING unnest(v_at) c(at) WHERE x.ctid = c.at RETURNING x.lane, x.stamp, x.type, x.head, x.depth, x.careful, x.queue, x.partition
    )
    SELECT array_agg(d.lane), array_agg(d.stamp), max(d.stamp), array_agg(d.type), array_agg(d.head), sum(d.depth), array_agg(d.careful), array_agg(d.queue), array_agg(d.partition)
      INTO v_lanes, v_stamps, v_stamp, v_types, v_heads, depth, v_careful, v_queues, v_partitions FROM d;
    EXIT WHEN v_lanes IS NOT NULL;
  END LOOP;
  IF v_lanes IS NULL THEN RETURN; END IF;
  IF EXISTS (SELECT FROM pauses) THEN
    -- They are claimed to be parked by the settlement. Virtual time goes by what is served: these must not move it.
    SELECT array_agg(x.held), max(x.stamp) FILTER (WHERE NOT x.held) INTO v_held, v_stamp FROM (
      SELECT u.stamp, EXISTS (SELECT FROM pauses p WHERE CASE WHEN p.queue = '' THEN p.partition = split_part(u.type, ' ', 1)
        ELSE p.queue = u.queue AND (p.partition IS NULL OR p.partition = u.partition) END) AS held
      FROM unnest(v_stamps, v_queues, v_partitions, v_types) u(stamp, queue, partition, type)) x;
  END IF;
  IF v_stamp > (SELECT s.last_value FROM stamps s) THEN PERFORM setval('stamps', v_stamp); END IF;
  fence := nextval('fences');
  v_most := greatest(1, p_budget / cardinality(v_lanes));
  -- A statement of its own, for a fresh snapshot: the lanes' operations are all committed by now. No ORDER BY: the
  -- nested loop gives them lane by lane, each in order, and the caller checks that.
  SELECT array_agg(h.ix::int), array_agg(o.seq), string_agg(o.id::text, ','), string_agg(o.type, ','), string_agg(o.priority::text, ','),
      array_agg(o.identity), string_agg(o.payload::text, E'\\x1e'), string_agg((date_part('epoch', t - o.accepted_at) * 1000)::bigint::text, ','),
      string_agg(CASE WHEN o.not_before > t OR h.held THEN '0' ELSE '1' END, ','), string_agg(o.attempts::text, ','), string_agg(o.max_attempts::text, ','),
      string_agg(o.timeout_ms::text, ','), array_agg(o.trace), string_agg(coalesce(o.idem::text, ''), ','), array_agg(o.gate), bool_or(o.gate IS NOT NULL)
    INTO v_ixs, v_seqs, ids, types, priorities, v_identities, payloads, waited_ms, due, attempts, max_attempts, timeouts_ms, v_traces, idems, v_gates, v_gated
  FROM unnest(v_lanes, v_types, v_heads, v_careful, v_held) WITH ORDINALITY h(lane, type, head, careful, held, ix),
    LATERAL (
      SELECT x.seq, x.id, x.type, x.priority, x.identity, x.payload, x.accepted_at, x.not_before, x.attempts, x.max_attempts, x.timeout_ms, x.trace, x.idem, x.gate
      FROM ops x WHERE x.lane = h.lane AND x.seq > h.head ORDER BY x.seq
      LIMIT CASE WHEN h.careful AND NOT h.type = ANY (p_trusted) THEN 1 WHEN h.type = ANY (p_together) THEN v_most ELSE least(p_each, v_most) END
    ) o;
  INSERT INTO leases (fence, worker, lanes, uptos, claimed_at)
    SELECT fence, p_worker, array_agg(x.lane), array_agg(x.upto), t FROM (
      SELECT v_lanes[u.ix] AS lane, max(u.seq) AS upto FROM unnest(v_ixs, v_seqs) u(ix, seq) GROUP BY u.ix ORDER BY v_lanes[u.ix]) x;
  lanes := array_to_string(v_lanes, ',');
  queues := array_to_json(v_queues); partitions := array_to_json(v_partitions);
  careful := array_to_string(v_careful::int[], ',');
  ixs := array_to_string(v_ixs, ','); seqs := array_to_string(v_seqs, ',');
  identities := array_to_json(v_identities); traces := array_to_json(v_traces);
  IF v_gated THEN gates := array_to_json(v_gates); END IF;
END $$;

-- Operations that run long: their start is told, and what was handed out behind them is handed out no more.
CREATE FUNCTION mark(p_worker uuid, m_fence bigint[], m_lane uuid[], m_seq bigint[], m_ago_ms bigint[]) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  r record;
  t timestamptz := clock();
BEGIN
  FOR r IN SELECT u.fence, array_agg(u.lane) AS lanes, array_agg(u.seq) AS seqs, array_agg(u.ago) AS agos
           FROM unnest(m_fence, m_lane, m_seq, m_ago_ms) u(fence, lane, seq, ago) GROUP BY u.fence ORDER BY u.fence LOOP
    UPDATE leases l SET uptos = (
      SELECT array_agg(coalesce((SELECT g.seq FROM unnest(r.lanes, r.seqs) g(lane, seq) WHERE g.lane = z.lane), z.upto) ORDER BY z.i)
      FROM unnest(l.lanes, l.uptos) WITH ORDINALITY z(lane, upto, i))
    WHERE l.fence = r.fence AND l.worker = p_worker;
    CONTINUE WHEN NOT FOUND;
    PERFORM FROM lanes l WHERE l.id = ANY (r.lanes) ORDER BY l.id FOR UPDATE;
    UPDATE lanes l SET running = true WHERE l.id = ANY (r.lanes);
    UPDATE ops o SET started_at = t - g.ago * interval '1 ms' FROM unnest(r.lanes, r.seqs, r.agos) g(lane, seq, ago)
    WHERE o.lane = g.lane AND o.seq = g.seq;
  END LOOP;
END $$;

-- Takes one operation out of its lane for good. The caller holds the lane's lock and has put the lane where it belongs.
CREATE FUNCTION bury(p_lane uuid, p_seq bigint, p_error text) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  WITH gone AS (DELETE FROM ops o WHERE o.lane = p_lane AND o.seq = p_seq RETURNING o.*)
  INSERT INTO dead_letters (id, died_at, lane, seq, queue, partition, type, priority, identity, payload, accepted_at, started_at, attempts, max_attempts, timeout_ms, error, trace, gate)
  SELECT g.id, t, g.lane, g.seq, l.queue, l.partition, g.type, g.priority, g.identity, g.payload, g.accepted_at, g.started_at, g.attempts, g.max_attempts, g.timeout_ms, p_error, g.trace, g.gate
  FROM gone g JOIN lanes l ON l.id = g.lane;
  UPDATE lanes l SET head = greatest(l.head, p_seq), depth = l.depth - 1, moved_at = t WHERE l.id = p_lane;
END $$;

-- Gives back the lanes of leases that end without a settlement. p_charge: did a process die over them?
CREATE FUNCTION leases_return(p_fences bigint[], p_charge boolean) RETURNS int LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  r record; o record;
  v_lanes uuid[]; v_uptos bigint[]; v_n int := 0;
BEGIN
  PERFORM pause_guard();
  WITH ended AS (DELETE FROM leases l WHERE l.fence = ANY (p_fences) RETURNING l.lanes, l.uptos)
  SELECT array_agg(z.lane ORDER BY z.lane), array_agg(z.upto ORDER BY z.lane) INTO v_lanes, v_uptos FROM ended e, unnest(e.lanes, e.uptos) z(lane, upto);
  IF v_lanes IS NULL THEN RETURN 0; END IF;
  IF p_charge THEN
    -- Keys and gates of what will be buried come before the lanes in the lock order.
    PERFORM FROM idempotency d WHERE d.key IN (
      SELECT x.idem FROM unnest(v_lanes) u(id) JOIN lanes l ON l.id = u.id, LATERAL (
        SELECT y.idem, y.attempts, y.max_attempts FROM ops y WHERE y.lane = l.id AND y.seq > l.head ORDER BY y.seq LIMIT 1) x
      WHERE x.idem IS NOT NULL AND x.attempts + 1 >= x.max_attempts) ORDER BY d.key FOR UPDATE;
    PERFORM FROM gates g WHERE g.name IN (
      SELECT x.gate FROM unnest(v_lanes) u(id) JOIN lanes l ON l.id = u.id, LATERAL (
        SELECT y.gate FROM ops y WHERE y.lane = l.id AND y.seq > l.head ORDER BY y.seq LIMIT 1) x
      WHERE x.gate IS NOT NULL) ORDER BY g.name FOR UPDATE;
  END IF;
  FOR r IN SELECT u.lane, u.upto FROM unnest(v_lanes, v_uptos) u(lane, upto) ORDER BY u.lane LOOP
    v_n := v_n + 1;
    UPDATE lanes l SET running = false WHERE l.id = r.lane;
    IF p_charge THEN
      SELECT x.seq, x.id, x.type, x.started_at, x.attempts, x.max_attempts, x.idem, x.gate INTO o FROM lanes l, ops x
        WHERE l.id = r.lane AND x.lane = l.id AND x.seq > l.head AND x.seq <= r.upto ORDER BY x.seq LIMIT 1;
      IF FOUND AND o.started_at IS NOT NULL THEN
        UPDATE ops x SET attempts = x.attempts + 1, started_at = NULL, error = 'The process that ran it was lost' WHERE x.lane = r.lane AND x.seq = o.seq;
        IF o.attempts + 1 >= o.max_attempts THEN
          IF o.idem IS NOT NULL THEN
            UPDATE idempotency d SET answer = json_build_object('v', 'failed', 'error', 'The process that ran it was lost') WHERE d.key = o.idem AND d.op = o.id AND d.answer IS NULL;
          END IF;
          IF o.gate IS NOT NULL THEN PERFORM gates_release(ARRAY[o.gate], ARRAY[1::bigint]); END IF;
          PERFORM bury(r.lane, o.seq, 'The process that ran it was lost, ' || (o.attempts + 1) || ' times');
          PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, o.type, -1);
          PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, '!dead', 1);
        END IF;
      END IF;
      UPDATE lanes l SET careful = greatest(l.careful, r.upto) WHERE l.id = r.lane;
    END IF;
    UPDATE ops x SET started_at = NULL FROM lanes l WHERE l.id = r.lane AND x.lane = l.id AND x.seq > l.head AND x.seq <= r.upto AND x.started_at IS NOT NULL;
    PERFORM lane_requeue(r.lane);
  END LOOP;
  RETURN v_n;
END $$;

-- Ends a process that has not been heard of: its leases are void from here on. One per call, so that the lanes'
-- locks are taken in order.
CREATE FUNCTION recover() RETURNS TABLE (worker uuid, name text, lanes int) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
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

CREATE FUNCTION worker_forget(p_worker uuid) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  -- Before what it holds, as whoever changes that does: else they wait for each other, or it leaves a place behind.
  PERFORM FROM workers x WHERE x.id = p_worker FOR UPDATE;
  -- What was left to it, and to nobody else, is for all again.
  UPDATE ready x SET type = split_part(x.type, ' ', 1)
    WHERE x.type IN (SELECT jsonb_object_keys(w.announced) FROM workers w WHERE w.id = p_worker)
      AND NOT EXISTS (SELECT FROM workers w WHERE w.id <> p_worker AND w.announced ? x.type);
  WITH gone AS (DELETE FROM tallies x WHERE x.worker = p_worker RETURNING x.type, x.n)
  INSERT INTO tallies (worker, part, type, n)
    SELECT '00000000-0000-0000-0000-000000000000', -1, g.type, sum(g.n) FROM gone g GROUP BY g.type HAVING sum(g.n) <> 0;
  DELETE FROM connections x WHERE x.worker = p_worker;
  DELETE FROM connection_writers x WHERE x.worker = p_worker;
  DELETE FROM workers x WHERE x.id = p_worker;
END $$;

-- A process that stops by itself: what it still holds was not run and is not charged.
CREATE FUNCTION retire(p_worker uuid) RETURNS int LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  v_n int;
BEGIN
  PERFORM FROM workers x WHERE x.id = p_worker FOR UPDATE;
  v_n := leases_return((SELECT coalesce(array_agg(l.fence), '{}') FROM leases l WHERE l.worker = p_worker), false);
  PERFORM worker_forget(p_worker);
  RETURN v_n;
END $$;

-- Leases that this process does not know of: it claimed them, but the answer never reached it. Younger ones may belong
-- to a call that is still under way; no call lasts that long.
CREATE FUNCTION disown(p_worker uuid, p_known bigint[]) RETURNS int LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT leases_return((SELECT coalesce(array_agg(l.fence), '{}') FROM leases l
    WHERE l.worker = p_worker AND NOT l.fence = ANY (p_known) AND l.claimed_at < clock() - interval '12 seconds'), false)
$$;

CREATE FUNCTION enlist(p_worker uuid, p_name text, p_lease_ms bigint, p_announced jsonb) RETURNS void LANGUAGE sql SET search_path FROM CURRENT AS $$
  INSERT INTO workers (id, name, started_at, until, announced) VALUES (p_worker, p_name, clock(), clock() + p_lease_ms * interval '1 ms', p_announced)
$$;

-- One call a second per process: heartbeat, and all a process has to know of the others.
CREATE FUNCTION pulse(p_worker uuid, p_lease_ms bigint, p_running json) RETURNS TABLE (
  alive boolean, now_ms double precision, waiting boolean, next_due_ms bigint, oldest_ms bigint,
  held json, running json, gates json, halts json, cancels json, lost int
) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  UPDATE workers w SET until = t + p_lease_ms * interval '1 ms', running = p_running WHERE w.id = p_worker;
  alive := FOUND;
  now_ms := extract(epoch FROM t) * 1000;
  waiting := EXISTS (SELECT FROM ready x);
  -- No min(): greatest(0, NULL) is 0, which would say that something is due.
  next_due_ms := (SELECT greatest(0, date_part('epoch', p.until - t) * 1000)::bigint FROM parked p WHERE p.until < 'infinity' ORDER BY p.until LIMIT 1);
  oldest_ms := coalesce((SELECT (extract(epoch FROM t - o.accepted_at) * 1000)::bigint FROM ops o ORDER BY o.id LIMIT 1), 0);
  held := (SELECT json_object_agg(x.type, x.n) FROM (SELECT y.type, sum(y.n) AS n FROM tallies y GROUP BY y.type) x);
  running := (SELECT json_object_agg(x.type, x.n) FROM (SELECT e.key AS type, sum(e.value::int) AS n FROM workers w, json_each_text(w.running) e GROUP BY e.key) x);
  gates := (SELECT json_agg(json_build_object('name', g.name, 'held', g.held, 'full_at', g.full_at, 'overflowing', g.overflowing)) FROM gates g);
  halts := (SELECT json_agg(json_build_object('scope', h.scope, 'reason', h.reason)) FROM halts h);
  cancels := (SELECT json_agg(c.id) FROM cancels c);
  lost := (SELECT count(*) FROM workers w WHERE w.until < t);
  RETURN NEXT;
END $$;
`,
}
