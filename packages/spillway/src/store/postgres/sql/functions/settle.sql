-- Settles what a process has finished.
--
-- Per lane, sorted by id: everything up to s_head leaves the lane; s_retry_ms puts the next operation back with a
-- delay; s_release gives the lane back. The fence: a settlement whose lease row is gone, or whose lane is not in it,
-- is refused as a whole.
--
-- Plans: the joins go from the small arrays to an index each time. Hash joins and sequential scans over small tables
-- that churn are a third slower (measured), so they are off inside these functions. Nested loops from the sorted arrays
-- also keep the lock order. The steps of settle have no settings of their own and run with those of settle.

-- Takes what settling these lanes will take, in the same order, before the effects are written: those may lock what
-- comes behind it in the lock order (the ledger's head is last). Per lane: false when the lease is lost.
CREATE OR REPLACE FUNCTION settle_hold(
  p_worker uuid, p_fences bigint[], p_lanes uuid[], p_keys uuid[]
) RETURNS boolean[]
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  PERFORM pause_guard();
  PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
  IF NOT FOUND THEN RETURN array_fill(false, ARRAY[cardinality(p_lanes)]); END IF;
  PERFORM FROM leases l WHERE l.fence = ANY (p_fences) AND l.worker = p_worker ORDER BY l.fence FOR UPDATE;
  IF cardinality(p_keys) > 0 THEN
    PERFORM FROM idempotency d WHERE d.key = ANY (p_keys) ORDER BY d.key FOR UPDATE;
  END IF;
  PERFORM FROM lanes l WHERE l.id = ANY (p_lanes) ORDER BY l.id FOR UPDATE;
  RETURN (SELECT array_agg(EXISTS (SELECT FROM leases l
          WHERE l.fence = u.fence AND l.worker = p_worker AND u.lane = ANY (l.lanes)) ORDER BY u.i)
    FROM unnest(p_fences, p_lanes) WITH ORDINALITY u(fence, lane, i));
END $$;

-- Returns the fences that are lost; then nothing was written. The caller drops what is lost and comes again with the
-- rest.
CREATE OR REPLACE FUNCTION settle(
  p_worker uuid, p_part smallint,
  s_fence bigint[], s_lane uuid[], s_from bigint[], s_head bigint[], s_left bigint[], s_release boolean[],
  s_retry_ms bigint[], s_retry_error text[], s_ago_ms bigint[],
  p_types text[], p_type_counts bigint[],    -- how many leave, per type
  p_gates text[], p_gate_counts bigint[],
  r_lane uuid[], r_seq bigint[], r_status text[], r_result text[], r_error text[], r_ago_ms bigint[],
  r_counted boolean[],
  r_key uuid[], r_answer text[],             -- the answers of their idempotency keys; empty if none has one
  s_leave text[]                             -- label of those that the next operation is left to; NULL if none is
) RETURNS bigint[]
  LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_hashjoin = off SET enable_mergejoin = off
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_lost bigint[]; v_leave text[]; v_gone bigint; v_release boolean[] := s_release;
  v_paused boolean := pause_guard(); v_keyed boolean := false;
  l record;
BEGIN
  -- First of all: a process that gives this one up takes the same lock first.
  PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
  IF NOT FOUND THEN RETURN (SELECT array_agg(DISTINCT x) FROM unnest(s_fence) x); END IF;
  IF s_leave IS NOT NULL THEN v_leave := settle_labels(s_leave); END IF;
  v_lost := fences_check(p_worker, s_fence, s_lane);
  IF v_lost IS NOT NULL THEN RETURN v_lost; END IF;

  IF cardinality(r_key) > 0 THEN PERFORM idempotency_settle(r_lane, r_seq, r_key, r_answer); END IF;
  IF cardinality(p_gates) > 0 THEN PERFORM gates_release(p_gates, p_gate_counts); END IF;
  l := lanes_move(s_lane, s_head, s_left, t);
  IF l.has_alone THEN v_keyed := turns_lock(s_lane); END IF;
  IF 0 <= ANY (s_retry_ms) THEN PERFORM ops_retry(s_lane, s_head, s_retry_ms, s_retry_error, v_leave, t); END IF;
  IF l.has_more THEN
    PERFORM lanes_release(s_lane, s_release, s_retry_ms, l.queues, l.partitions, l.heads, l.depths, l.careful, v_leave,
      v_paused, t);
  END IF;
  -- An empty lane is released, whether that was asked for or not.
  IF l.has_emptied THEN
    SELECT array_agg(u.release OR u.depth = 0) INTO v_release FROM unnest(s_release, l.depths) u(release, depth);
  END IF;

  v_gone := CASE WHEN cardinality(r_lane) = 0
    THEN ops_complete(s_lane, s_from, s_head, s_ago_ms, l.queues, l.partitions, t)
    ELSE ops_finish(r_lane, r_seq, r_status, r_result, r_error, r_ago_ms, r_counted, t) END;
  IF v_gone IS DISTINCT FROM (SELECT coalesce(sum(x), 0) FROM unnest(s_left) x) THEN
    RAISE EXCEPTION 'settled % operations where % were expected', v_gone, (SELECT sum(x) FROM unnest(s_left) x)
      USING ERRCODE = 'XX000';
  END IF;
  IF v_keyed THEN PERFORM turns_return(s_lane); END IF;
  IF l.has_alone THEN PERFORM lanes_drop(s_lane); END IF;
  PERFORM leases_shrink(s_fence, s_lane, v_release);
  FOR i IN 1 .. cardinality(p_types) LOOP
    PERFORM tally(p_worker, p_part, p_types[i], - p_type_counts[i]);
  END LOOP;
  RETURN '{}';
END $$;

-- Which of these labels a process still announces. The process that removes the last of them waits for us, and then
-- finds the label that we set (worker_forget).
CREATE OR REPLACE FUNCTION settle_labels(p_labels text[]) RETURNS text[]
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM FROM workers w WHERE w.announced ?| p_labels ORDER BY w.id FOR KEY SHARE;
  RETURN ARRAY(SELECT CASE WHEN EXISTS (SELECT FROM workers w WHERE w.announced ? u.label) THEN u.label END
    FROM unnest(p_labels) WITH ORDINALITY u(label, i) ORDER BY u.i);
END $$;

-- The fence: every lease named must exist, be ours, and still hold the lane. Returns the fences that are lost, or NULL.
CREATE OR REPLACE FUNCTION fences_check(p_worker uuid, p_fences bigint[], p_lanes uuid[]) RETURNS bigint[]
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  RETURN (SELECT array_agg(u.fence) FROM (
      SELECT s.fence, array_agg(s.lane ORDER BY s.lane) AS lanes FROM unnest(p_fences, p_lanes) s(fence, lane)
      GROUP BY s.fence ORDER BY s.fence
    ) u LEFT JOIN LATERAL (
      SELECT l.lanes FROM leases l WHERE l.fence = u.fence AND l.worker = p_worker FOR UPDATE
    ) l ON true
    -- Mostly a claim is settled as a whole, and equality is found in one pass; containment compares each with each.
    WHERE l.lanes IS NULL OR NOT (u.lanes = l.lanes OR u.lanes <@ l.lanes));
END $$;

-- Moves the lanes on, in id order (p_lanes is sorted, and the results are in its order). A statement of its own: what
-- is read of them from here on stays so until we commit.
CREATE OR REPLACE FUNCTION lanes_move(
  p_lanes uuid[], p_heads bigint[], p_left bigint[], p_at timestamptz,
  OUT queues text[], OUT partitions text[], OUT heads bigint[], OUT depths bigint[], OUT careful boolean[],
  OUT has_more boolean, OUT has_emptied boolean, OUT has_alone boolean
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  WITH moved AS (
    UPDATE lanes l SET
      head = greatest(l.head, u.head), depth = l.depth - u.gone,
      running = false, moved_at = CASE WHEN u.gone > 0 THEN p_at ELSE l.moved_at END,
      pace_ms = CASE WHEN u.gone = 0 THEN l.pace_ms ELSE
        coalesce(l.pace_ms * 0.7, 0) + (CASE WHEN l.pace_ms IS NULL THEN 1 ELSE 0.3 END)
          * least(date_part('epoch', p_at - l.moved_at) * 1000 / u.gone, 3.6e6) END
    FROM unnest(p_lanes, p_heads, p_left) u(lane, head, gone)
    WHERE l.id = u.lane
    RETURNING l.queue, l.partition, l.head, l.depth, l.careful > l.head AS careful, l.alone
  )
  SELECT array_agg(m.queue), array_agg(m.partition), array_agg(m.head), array_agg(m.depth), array_agg(m.careful),
      bool_or(m.depth > 0), bool_or(m.depth = 0), bool_or(m.alone)
    INTO queues, partitions, heads, depths, careful, has_more, has_emptied, has_alone FROM moved m;
END $$;

-- An operation that failed and is retried keeps its place.
CREATE OR REPLACE FUNCTION ops_retry(
  p_lanes uuid[], p_heads bigint[], p_retry_ms bigint[], p_errors text[], p_labels text[], p_at timestamptz
) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE ops o SET attempts = o.attempts + CASE WHEN u.error IS NULL THEN 0 ELSE 1 END,
      error = coalesce(u.error, o.error), started_at = NULL,
      not_before = CASE WHEN u.label IS NULL THEN p_at + u.retry_ms * interval '1 ms' END
    FROM (
      SELECT x.lane, n.seq, x.retry_ms, x.error, x.label
      FROM unnest(p_lanes, p_heads, p_retry_ms, p_errors, p_labels) x(lane, head, retry_ms, error, label),
        LATERAL (SELECT y.seq FROM ops y WHERE y.lane = x.lane AND y.seq > x.head ORDER BY y.seq LIMIT 1) n
      WHERE x.retry_ms IS NOT NULL OFFSET 0
    ) u WHERE o.lane = u.lane AND o.seq = u.seq;
END $$;

-- Puts the lanes that are given back where they belong: the next operation decides. Its stamp is not before those who
-- wait: an identity whose lanes are all claimed lags behind what was claimed of others, and a newcomer, who begins
-- where that is, would have to wait until it has caught up.
CREATE OR REPLACE FUNCTION lanes_release(
  p_lanes uuid[], p_release boolean[], p_retry_ms bigint[], p_queues text[], p_partitions text[], p_heads bigint[],
  p_depths bigint[], p_careful boolean[], p_labels text[], p_paused boolean, p_at timestamptz
) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_levels bigint[] := ARRAY(
    SELECT (SELECT x.stamp FROM ready x WHERE x.priority = p ORDER BY x.stamp LIMIT 1) FROM generate_series(1, 10) p);
BEGIN
  WITH next AS (
    SELECT u.lane, CASE WHEN u.label IS NULL THEN u.retry_ms END AS retry_ms, u.queue, u.partition, u.head, u.depth,
      u.careful, o.seq, o.priority, o.stamp AS was, greatest(o.stamp, v_levels[o.priority] + 1) AS stamp,
      coalesce(u.label, o.type) AS type, o.not_before,
      p_paused AND EXISTS (SELECT FROM pauses p WHERE CASE WHEN p.queue = '' THEN p.partition = o.type
        ELSE p.queue = u.queue AND (p.partition IS NULL OR p.partition = u.partition) END) AS paused
    FROM unnest(p_lanes, p_release, p_retry_ms, p_queues, p_partitions, p_heads, p_depths, p_careful, p_labels)
        u(lane, release, retry_ms, queue, partition, head, depth, careful, label),
      LATERAL (
        SELECT x.seq, x.priority, x.stamp, x.type, x.not_before FROM ops x
        WHERE x.lane = u.lane AND x.seq > u.head ORDER BY x.seq LIMIT 1
      ) o
    WHERE u.release AND u.depth > 0
  ), lifted AS (
    UPDATE ops o SET stamp = n.stamp FROM next n WHERE n.stamp > n.was AND o.lane = n.lane AND o.seq = n.seq
  ), put_aside AS (
    INSERT INTO parked (lane, until, reason)
    SELECT n.lane, CASE WHEN n.paused THEN 'infinity'::timestamptz
        WHEN n.retry_ms IS NOT NULL THEN p_at + n.retry_ms * interval '1 ms' ELSE n.not_before END,
      CASE WHEN n.paused THEN 'pause' WHEN n.retry_ms IS NOT NULL THEN 'retry' ELSE 'delay' END
    FROM next n WHERE n.paused OR n.retry_ms IS NOT NULL OR n.not_before > p_at
  )
  INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
    SELECT n.lane, n.priority, n.stamp, n.type, n.head, n.depth, n.careful, n.queue, n.partition FROM next n
    WHERE NOT n.paused AND n.retry_ms IS NULL AND (n.not_before IS NULL OR n.not_before <= p_at);
END $$;

-- Moves completed operations without results to history, by ranges. Returns how many. From one source, or the range is
-- not used for the index: with lanes joined in, whole lanes were read.
CREATE OR REPLACE FUNCTION ops_complete(
  p_lanes uuid[], p_from bigint[], p_heads bigint[], p_ago_ms bigint[], p_queues text[], p_partitions text[],
  p_at timestamptz
) RETURNS bigint
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_gone bigint;
BEGIN
  WITH gone AS (
    DELETE FROM ops o
    USING unnest(p_lanes, p_from, p_heads, p_ago_ms, p_queues, p_partitions) u(lane, base, head, ago, queue, partition)
    WHERE o.lane = u.lane AND o.seq > u.base AND o.seq <= u.head
    RETURNING o.id, o.type, o.priority, o.identity, o.accepted_at, o.attempts, o.max_attempts, o.trace, u.queue,
      u.partition, u.ago
  )
  INSERT INTO history (id, finished_at, status, type, queue, partition, priority, identity, accepted_at, started_at,
      attempts, max_attempts, error, trace)
    SELECT g.id, p_at, 'completed', g.type, g.queue, g.partition, g.priority, g.identity, g.accepted_at,
      p_at - g.ago * interval '1 ms', g.attempts + 1, g.max_attempts, NULL, g.trace
    FROM gone g;
  GET DIAGNOSTICS v_gone = ROW_COUNT;
  RETURN v_gone;
END $$;

-- Moves finished operations to history, and failed ones to the dead letters, one by one. Returns how many.
-- 'answered' and 'expired' are failed, too, but leave no dead letter: the caller was answered with it, or running it
-- again would be too late again.
-- Each insert joins the lanes itself: one join for both would copy whole operations, payloads too, once more (4%).
CREATE OR REPLACE FUNCTION ops_finish(
  r_lane uuid[], r_seq bigint[], r_status text[], r_result text[], r_error text[], r_ago_ms bigint[],
  r_counted boolean[], p_at timestamptz
) RETURNS bigint
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_gone bigint;
BEGIN
  WITH gone AS (
    DELETE FROM ops o
    USING unnest(r_lane, r_seq, r_status, r_result, r_error, r_ago_ms, r_counted)
      u(lane, seq, status, result, error, ago, counted)
    WHERE o.lane = u.lane AND o.seq = u.seq
    RETURNING o.*, u.status, u.result, u.error AS why, u.ago, u.counted
  ), kept AS (
    INSERT INTO history (id, finished_at, status, type, queue, partition, priority, identity, accepted_at, started_at,
        attempts, max_attempts, error, result, trace, code)
    SELECT g.id, p_at, CASE WHEN g.status IN ('answered', 'expired') THEN 'failed' ELSE g.status END, g.type, l.queue,
      l.partition, g.priority, g.identity, g.accepted_at,
      CASE WHEN g.counted THEN p_at - g.ago * interval '1 ms' END, g.attempts + g.counted::int, g.max_attempts, g.why,
      g.result::json, g.trace, CASE g.status WHEN 'expired' THEN 'expired' END
    FROM gone g JOIN lanes l ON l.id = g.lane WHERE g.status <> 'failed'
    RETURNING 1
  ), died AS (
    INSERT INTO dead_letters (id, died_at, lane, seq, queue, partition, type, priority, identity, payload, accepted_at,
        started_at, attempts, max_attempts, timeout_ms, error, result, trace, gate, key, most)
    SELECT g.id, p_at, g.lane, g.seq, l.queue, l.partition, g.type, g.priority, g.identity, g.payload, g.accepted_at,
      CASE WHEN g.counted THEN p_at - g.ago * interval '1 ms' END, g.attempts + g.counted::int, g.max_attempts,
      g.timeout_ms, g.why, g.result::json, g.trace, g.gate, l.key,
      (SELECT k.most FROM turns k WHERE k.key = l.key)
    FROM gone g JOIN lanes l ON l.id = g.lane WHERE g.status = 'failed'
    RETURNING 1
  )
  SELECT (SELECT count(*) FROM kept) + (SELECT count(*) FROM died) INTO v_gone;
  RETURN v_gone;
END $$;

-- A lease whose lanes are all released is deleted, the others lose those that are. (All lanes named are in their
-- leases, each once, so comparing numbers is enough.)
CREATE OR REPLACE FUNCTION leases_shrink(p_fences bigint[], p_lanes uuid[], p_release boolean[]) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  DELETE FROM leases l USING (
      SELECT x.fence, count(*) AS n FROM unnest(p_fences, p_release) x(fence, release) WHERE x.release GROUP BY x.fence
    ) u WHERE l.fence = u.fence AND cardinality(l.lanes) = u.n;
  UPDATE leases l SET lanes = k.lanes, uptos = k.uptos
    FROM (SELECT DISTINCT x.fence FROM unnest(p_fences, p_release) x(fence, release) WHERE x.release) f,
      LATERAL (
        SELECT coalesce(array_agg(z.lane), '{}') AS lanes, coalesce(array_agg(z.upto), '{}') AS uptos
        FROM leases q, unnest(q.lanes, q.uptos) z(lane, upto)
        WHERE q.fence = f.fence AND NOT EXISTS (
          SELECT FROM unnest(p_lanes, p_release) g(lane, release) WHERE g.release AND g.lane = z.lane)
      ) k
    WHERE l.fence = f.fence;
END $$;

-- After a commit that was not confirmed. The transaction in question holds the lease's lock until it has ended.
CREATE OR REPLACE FUNCTION confirm(p_worker uuid, p_fence bigint, p_lane uuid, p_seq bigint) RETURNS text
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  PERFORM FROM leases l WHERE l.fence = p_fence AND l.worker = p_worker AND p_lane = ANY (l.lanes) FOR UPDATE;
  IF NOT FOUND THEN RETURN 'lost'; END IF;
  RETURN CASE WHEN EXISTS (SELECT FROM ops o WHERE o.lane = p_lane AND o.seq = p_seq) THEN 'pending' ELSE 'left' END;
END $$;
