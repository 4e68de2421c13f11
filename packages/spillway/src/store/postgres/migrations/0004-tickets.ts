import { sweeping } from './sweeping.js'

/** What callers and operators do to operations, lanes and gates; and the sweeping. */
export const tickets = {
  version: 4,
  name: 'tickets',
  sql: `
-- While anything is paused, whoever may park a lane for it keeps resuming out until he has committed: a lane that were
-- parked just after its queue was resumed would be forgotten. Before any other lock.
CREATE FUNCTION pause_guard() RETURNS boolean LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  IF NOT EXISTS (SELECT FROM pauses) THEN RETURN false; END IF;
  PERFORM pg_advisory_xact_lock_shared(hashtext('spillway.pauses'), hashtext(current_schema()));
  RETURN EXISTS (SELECT FROM pauses);
END $$;

-- Is this lane held back by an operator?
CREATE FUNCTION lane_paused(p_lane uuid) RETURNS boolean LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT EXISTS (SELECT FROM lanes l JOIN pauses p ON CASE WHEN p.queue = ''
      THEN p.partition = (SELECT x.type FROM ops x WHERE x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1)
      ELSE p.queue = l.queue AND (p.partition IS NULL OR p.partition = l.partition) END WHERE l.id = p_lane)
$$;

-- Puts a lane that has operations where it belongs. The caller holds its lock, and it is nowhere else.
CREATE FUNCTION lane_requeue(p_lane uuid) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  o record;
BEGIN
  SELECT x.priority, x.stamp, x.type, x.not_before, l.head, l.depth, l.careful > l.head AS careful, l.queue, l.partition INTO o FROM lanes l, ops x
    WHERE l.id = p_lane AND x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1;
  IF NOT FOUND THEN
    RETURN;
  ELSIF lane_paused(p_lane) THEN
    INSERT INTO parked (lane, until, reason) VALUES (p_lane, 'infinity', 'pause');
  ELSIF o.not_before > t THEN
    INSERT INTO parked (lane, until, reason) VALUES (p_lane, o.not_before, 'delay');
  ELSE
    INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
      VALUES (p_lane, o.priority, o.stamp, o.type, o.head, o.depth, o.careful, o.queue, o.partition);
  END IF;
END $$;

CREATE FUNCTION gates_release(p_names text[], p_counts bigint[]) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  r record;
BEGIN
  FOR r IN SELECT u.name, u.n FROM unnest(p_names, p_counts) u(name, n) ORDER BY u.name LOOP
    UPDATE gates x SET held = greatest(0, x.held - r.n),
      overflowing = x.overflowing AND x.held - r.n >= x.resume_below,
      changed_at = CASE WHEN x.overflowing AND x.held - r.n < x.resume_below THEN clock() ELSE x.changed_at END
    WHERE x.name = r.name;
  END LOOP;
END $$;

-- Takes a pending operation out of its lane. 'asked' when it runs and its handler can stop, 'running' when it cannot,
-- 'gone' when it is not in the queue. Who holds the lane's ready or parked row, or sees its lease, knows where it is.
CREATE FUNCTION cancel(p_id uuid, p_abortable text[], p_why text) RETURNS text LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  o record; f record;
  v_at tid; v_upto bigint; v_where text; v_depth bigint;
BEGIN
  PERFORM pause_guard();
  SELECT x.lane, x.seq, x.type, x.idem, x.gate INTO o FROM ops x WHERE x.id = p_id;
  IF NOT FOUND THEN RETURN 'gone'; END IF;
  PERFORM FROM idempotency d WHERE d.key = o.idem FOR UPDATE;
  PERFORM FROM gates g WHERE g.name = o.gate FOR UPDATE;
  PERFORM FROM lanes l WHERE l.id = o.lane FOR UPDATE;
  SELECT x.seq INTO o.seq FROM ops x WHERE x.id = p_id FOR UPDATE;
  IF NOT FOUND THEN RETURN 'gone'; END IF;
  FOR i IN 1 .. 20 LOOP
    SELECT x.seq, x.priority, x.stamp INTO f FROM lanes l, ops x WHERE l.id = o.lane AND x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1;
    SELECT x.ctid INTO v_at FROM ready x WHERE x.priority = f.priority AND x.stamp = f.stamp AND x.lane = o.lane FOR UPDATE;
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
  INSERT INTO history (id, finished_at, status, type, queue, partition, priority, identity, accepted_at, attempts, max_attempts, error, trace)
    SELECT g.id, t, 'cancelled', g.type, l.queue, l.partition, g.priority, g.identity, g.accepted_at, g.attempts, g.max_attempts, p_why, g.trace
    FROM gone g JOIN lanes l ON l.id = g.lane;
  UPDATE lanes l SET depth = l.depth - 1, head = CASE WHEN f.seq = o.seq AND v_where <> 'leased' THEN o.seq ELSE l.head END
    WHERE l.id = o.lane RETURNING l.depth INTO v_depth;
  IF v_where <> 'leased' AND f.seq = o.seq THEN
    DELETE FROM ready x WHERE x.ctid = v_at AND v_where = 'ready';
    DELETE FROM parked x WHERE x.lane = o.lane AND v_where = 'parked';
    IF v_depth > 0 THEN PERFORM lane_requeue(o.lane); END IF;
  END IF;
  IF o.idem IS NOT NULL THEN
    UPDATE idempotency d SET answer = json_build_object('v', 'cancelled') WHERE d.key = o.idem AND d.op = p_id AND d.answer IS NULL;
  END IF;
  IF o.gate IS NOT NULL THEN PERFORM gates_release(ARRAY[o.gate], ARRAY[1::bigint]); END IF;
  PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, o.type, -1);
  RETURN 'cancelled';
END $$;

-- Dead letters join the tail of their lanes again, in the order in which they were accepted, with all attempts anew.
-- Those whose capacity gate is full stay where they are.
CREATE FUNCTION redrive(p_ids uuid[]) RETURNS TABLE (moved int, skipped int) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  d record; g record;
  v_depth bigint; v_tail bigint; v_stamp bigint;
BEGIN
  PERFORM pause_guard();
  moved := 0; skipped := 0;
  PERFORM FROM dead_letters x WHERE x.id = ANY (p_ids) ORDER BY x.id FOR UPDATE;
  PERFORM FROM gates x WHERE x.name IN (SELECT y.gate FROM dead_letters y WHERE y.id = ANY (p_ids)) ORDER BY x.name FOR UPDATE;
  FOR d IN SELECT x.* FROM dead_letters x WHERE x.id = ANY (p_ids) ORDER BY x.lane, x.seq LOOP
    IF d.gate IS NOT NULL THEN
      UPDATE gates x SET held = x.held + 1, overflowing = x.held + 1 >= x.full_at WHERE x.name = d.gate AND NOT x.overflowing AND x.held < x.full_at;
      IF NOT FOUND THEN
        skipped := skipped + 1;
        CONTINUE;
      END IF;
    END IF;
    INSERT INTO lanes AS l (id, queue, partition, tail, depth, moved_at) VALUES (d.lane, d.queue, d.partition, 1, 1, t)
      ON CONFLICT (id) DO UPDATE SET tail = l.tail + 1, depth = l.depth + 1, moved_at = CASE WHEN l.depth = 0 THEN t ELSE l.moved_at END
      RETURNING l.depth, l.tail INTO v_depth, v_tail;
    v_stamp := coalesce((SELECT x.stamp FROM ready x WHERE x.priority = d.priority ORDER BY x.stamp LIMIT 1), (SELECT s.last_value FROM stamps s));
    INSERT INTO ops (lane, seq, id, type, priority, stamp, identity, payload, accepted_at, max_attempts, timeout_ms, trace, gate)
      VALUES (d.lane, v_tail, d.id, d.type, d.priority, v_stamp, d.identity, d.payload, d.accepted_at, d.max_attempts, d.timeout_ms, d.trace, d.gate);
    IF v_depth = 1 THEN PERFORM lane_requeue(d.lane); END IF;
    DELETE FROM dead_letters x WHERE x.id = d.id;
    DELETE FROM cancels x WHERE x.id = d.id;
    PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, d.type, 1);
    moved := moved + 1;
  END LOOP;
  PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, '!dead', - moved) WHERE moved > 0;
  RETURN NEXT;
END $$;

CREATE FUNCTION purge(p_ids uuid[]) RETURNS int LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  v_n int;
BEGIN
  DELETE FROM dead_letters x WHERE x.id = ANY (p_ids);
  GET DIAGNOSTICS v_n = ROW_COUNT;
  PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, '!dead', - v_n) WHERE v_n > 0;
  RETURN v_n;
END $$;

CREATE FUNCTION pause(p_queue text, p_partition text) RETURNS void LANGUAGE sql SET search_path FROM CURRENT AS $$
  INSERT INTO pauses (queue, partition, since) VALUES (p_queue, p_partition, clock()) ON CONFLICT DO NOTHING
$$;

-- Resuming a queue ends the pauses of its single lanes too. All its lanes go on at once, by priority as ever.
CREATE FUNCTION resume(p_queue text, p_partition text) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_lane uuid;
BEGIN
  PERFORM pg_advisory_xact_lock(hashtext('spillway.pauses'), hashtext(current_schema()));
  DELETE FROM pauses p WHERE p.queue = p_queue AND (p_partition IS NULL OR p.partition = p_partition);
  FOR v_lane IN
    WITH held AS (
      SELECT x.lane FROM parked x JOIN lanes l ON l.id = x.lane
      WHERE x.reason = 'pause' AND (p_queue = '' OR l.queue = p_queue AND (p_partition IS NULL OR l.partition = p_partition)) ORDER BY x.lane FOR UPDATE OF x
    )
    DELETE FROM parked x USING held h WHERE x.lane = h.lane RETURNING x.lane
  LOOP
    -- Back here if another pause still holds it.
    PERFORM lane_requeue(v_lane);
  END LOOP;
END $$;

CREATE FUNCTION gate_register(p_name text, p_full_at bigint, p_resume_below bigint) RETURNS void LANGUAGE sql SET search_path FROM CURRENT AS $$
  INSERT INTO gates AS g (name, full_at, resume_below, changed_at) VALUES (p_name, p_full_at, p_resume_below, clock())
  ON CONFLICT (name) DO UPDATE SET full_at = excluded.full_at, resume_below = excluded.resume_below,
    overflowing = g.held >= excluded.full_at OR (g.overflowing AND g.held >= excluded.resume_below)
  WHERE (g.full_at, g.resume_below) IS DISTINCT FROM (excluded.full_at, excluded.resume_below)
$$;

-- True when it was not halted before. Waits for what is being accepted: see accept.
CREATE FUNCTION halt_set(p_scope text, p_reason text) RETURNS boolean LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtext('spillway.halts'), hashtext(current_schema()));
  INSERT INTO halts (scope, reason, since) VALUES (p_scope, p_reason, clock()) ON CONFLICT (scope) DO NOTHING;
  RETURN FOUND;
END $$;

-- What a process gives back and takes of a pool's places, in this order. Of what it takes: 0 granted, 1 the identity has all it
-- may, 2 the pool is full. One row lock per pool makes it exact; places of processes that are gone do not count.
-- p_seq grows with each call. A call whose answer was lost may have been carried out, or may come later yet: the next one says
-- with p_held what the process holds in truth, and the late one finds that it is late (NULL).
CREATE FUNCTION connections_change(p_worker uuid, p_pool text, p_seq bigint, p_held text[], p_counts int[], p_gives text[], p_takes text[], p_each int[], p_all int[])
  RETURNS smallint[] LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_out smallint[] := '{}'; v_total bigint; v_mine bigint; r record;
BEGIN
  INSERT INTO connection_pools (pool) VALUES (p_pool) ON CONFLICT DO NOTHING;
  PERFORM FROM connection_pools x WHERE x.pool = p_pool FOR UPDATE;
  PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
  IF NOT FOUND THEN RAISE EXCEPTION 'process % is not enlisted', p_worker USING ERRCODE = '55000'; END IF;
  INSERT INTO connection_writers AS x (pool, worker, seq) VALUES (p_pool, p_worker, p_seq)
    ON CONFLICT (pool, worker) DO UPDATE SET seq = excluded.seq WHERE x.seq < excluded.seq;
  IF NOT FOUND THEN RETURN NULL; END IF;
  IF p_held IS NOT NULL THEN
    DELETE FROM connections c WHERE c.pool = p_pool AND c.worker = p_worker AND NOT c.identity = ANY (p_held);
    INSERT INTO connections AS c (pool, identity, worker, held) SELECT p_pool, u.who, p_worker, u.n FROM unnest(p_held, p_counts) u(who, n)
      ON CONFLICT (pool, identity, worker) DO UPDATE SET held = excluded.held;
  END IF;
  FOR r IN SELECT u.who, count(*)::int AS n FROM unnest(p_gives) u(who) GROUP BY u.who LOOP
    DELETE FROM connections c WHERE c.pool = p_pool AND c.identity = r.who AND c.worker = p_worker AND c.held <= r.n;
    CONTINUE WHEN FOUND;
    UPDATE connections c SET held = c.held - r.n WHERE c.pool = p_pool AND c.identity = r.who AND c.worker = p_worker;
  END LOOP;
  IF cardinality(p_takes) = 0 THEN RETURN v_out; END IF;
  SELECT coalesce(sum(c.held), 0) INTO v_total FROM connections c JOIN workers w ON w.id = c.worker WHERE c.pool = p_pool;
  FOR r IN SELECT u.who, u.each_max, u.all_max FROM unnest(p_takes, p_each, p_all) WITH ORDINALITY u(who, each_max, all_max, i) ORDER BY u.i LOOP
    SELECT coalesce(sum(c.held), 0) INTO v_mine FROM connections c JOIN workers w ON w.id = c.worker WHERE c.pool = p_pool AND c.identity = r.who;
    IF v_mine >= r.each_max THEN
      v_out := v_out || 1::smallint;
    ELSIF v_total >= r.all_max THEN
      v_out := v_out || 2::smallint;
    ELSE
      INSERT INTO connections AS c (pool, identity, worker, held) VALUES (p_pool, r.who, p_worker, 1)
        ON CONFLICT (pool, identity, worker) DO UPDATE SET held = c.held + 1;
      v_total := v_total + 1;
      v_out := v_out || 0::smallint;
    END IF;
  END LOOP;
  RETURN v_out;
END $$;

-- Fails when the disk is full (53100). Updating a row does not: there is room in its page, and in the log. Growing a file does,
-- so 1 MB, which is more than the statement may keep in memory, goes to a file that is gone afterwards: about 1 ms.
CREATE FUNCTION space_check() RETURNS void LANGUAGE plpgsql SET work_mem = '64kB' SET temp_tablespaces = '' AS $$
DECLARE
  v_count bigint;
BEGIN
  WITH x AS MATERIALIZED (SELECT repeat('x', 8000) FROM generate_series(1, 128)) SELECT count(*) FROM x INTO v_count;
EXCEPTION WHEN configuration_limit_exceeded THEN
  -- temp_file_limit is below that: nothing can be said of the disk.
  NULL;
END $$;

${sweeping}
-- Everything that must hold between transactions; no row when it does.
CREATE FUNCTION audit() RETURNS TABLE (fault text) LANGUAGE sql SET search_path FROM CURRENT AS $$
  WITH places AS (
    SELECT lane FROM ready UNION ALL SELECT lane FROM parked UNION ALL SELECT unnest(lanes) FROM leases
  ), counted AS (
    SELECT l.id, l.head, l.tail, l.depth, coalesce(p.n, 0) AS places, coalesce(o.n, 0) AS ops, o.first, o.last
    FROM lanes l
    LEFT JOIN (SELECT lane, count(*) AS n FROM places GROUP BY lane) p ON p.lane = l.id
    LEFT JOIN (SELECT lane, count(*) AS n, min(seq) AS first, max(seq) AS last FROM ops GROUP BY lane) o ON o.lane = l.id
  )
  SELECT format('lane %s has %s operations but says %s', id, ops, depth) FROM counted WHERE ops <> depth
  UNION ALL SELECT format('lane %s with %s operations is in %s places', id, ops, places) FROM counted WHERE (ops > 0) <> (places = 1) AND NOT (ops = 0 AND places = 0)
  UNION ALL SELECT format('lane %s has sequences %s..%s outside %s..%s', id, first, last, head, tail) FROM counted WHERE first <= head OR last > tail
  UNION ALL SELECT format('operation %s has no lane', o.id) FROM ops o WHERE NOT EXISTS (SELECT FROM lanes l WHERE l.id = o.lane)
  UNION ALL SELECT format('lane %s waits without being known', p.lane) FROM places p WHERE NOT EXISTS (SELECT FROM lanes l WHERE l.id = p.lane)
  UNION ALL SELECT format('lane %s is ready with a stamp that is not its head''s', r.lane) FROM ready r WHERE NOT EXISTS (
    SELECT FROM lanes l, LATERAL (SELECT x.priority, x.stamp FROM ops x WHERE x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1) o
    WHERE l.id = r.lane AND o.priority = r.priority AND o.stamp = r.stamp)
  UNION ALL SELECT format('lane %s is ready with another name, or a head or caution that would pass an operation by', r.lane) FROM ready r JOIN lanes l ON l.id = r.lane
    WHERE r.queue <> l.queue OR r.partition <> l.partition OR EXISTS (SELECT FROM ops o WHERE o.lane = l.id AND (o.seq <= r.head OR o.seq <= l.careful AND NOT r.careful))
  UNION ALL SELECT format('lane %s is ready under %s, which is not its head''s type, or nobody''s label', r.lane, r.type) FROM ready r
    WHERE (strpos(r.type, ' ') > 0 AND NOT EXISTS (SELECT FROM workers w WHERE w.announced ? r.type))
      OR split_part(r.type, ' ', 1) IS DISTINCT FROM (SELECT o.type FROM lanes l, ops o WHERE l.id = r.lane AND o.lane = l.id AND o.seq > l.head ORDER BY o.seq LIMIT 1)
  UNION ALL SELECT format('lease %s belongs to nobody', l.fence) FROM leases l WHERE NOT EXISTS (SELECT FROM workers w WHERE w.id = l.worker)
  UNION ALL SELECT format('type %s: %s operations, %s tallied', coalesce(o.type, t.type), coalesce(o.n, 0), coalesce(t.n, 0))
    FROM (SELECT type, count(*) AS n FROM ops GROUP BY type) o FULL JOIN (SELECT type, sum(n) AS n FROM tallies WHERE type <> '!dead' GROUP BY type) t USING (type)
    WHERE coalesce(o.n, 0) <> coalesce(t.n, 0)
  UNION ALL SELECT format('%s dead letters, %s tallied', d.n, t.n) FROM (SELECT count(*) AS n FROM dead_letters) d, (SELECT coalesce(sum(n), 0) AS n FROM tallies WHERE type = '!dead') t WHERE d.n <> t.n
$$;
`,
}
