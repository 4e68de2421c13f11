-- Claims ready lanes for a process, under a lease with a new fence.
--
-- Plans: as in settle.sql, hash joins and sequential scans are off.

-- Lanes whose time has come.
CREATE OR REPLACE FUNCTION promote(p_most int) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_hashjoin = off SET enable_mergejoin = off
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_n int;
BEGIN
  IF NOT EXISTS (SELECT FROM parked p WHERE p.until <= t) THEN RETURN 0; END IF;
  WITH due AS (
    SELECT p.lane FROM parked p WHERE p.until <= t AND p.key IS NULL ORDER BY p.until LIMIT p_most
      FOR UPDATE SKIP LOCKED
  ), heads AS (
    SELECT d.lane, o.priority, o.stamp, o.type, l.head, l.depth, l.careful > l.head AS careful, l.queue, l.partition
      FROM due d JOIN lanes l ON l.id = d.lane,
      LATERAL (SELECT x.priority, x.stamp, x.type FROM ops x WHERE x.lane = l.id AND x.seq > l.head ORDER BY x.seq
          LIMIT 1) o
  ), gone AS (
    DELETE FROM parked p USING heads h WHERE p.lane = h.lane RETURNING p.lane
  ), readied AS (
    INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
      SELECT h.lane, h.priority, h.stamp, h.type, h.head, h.depth, h.careful, h.queue, h.partition
        FROM heads h JOIN gone g ON g.lane = h.lane RETURNING 1
  )
  SELECT count(*) INTO v_n FROM readied;
  IF EXISTS (SELECT FROM turns) THEN v_n := v_n + turns_promote(p_most, t); END IF;
  RETURN v_n;
END $$;

-- Of these types those that have a ready lane; NULL: none has. Of all types (NULL): an empty list, if there is any
-- lane.
CREATE OR REPLACE FUNCTION ready_types(p_types text[]) RETURNS text[]
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off
  SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
  IF p_types IS NULL THEN RETURN CASE WHEN EXISTS (SELECT FROM ready x) THEN '{}'::text[] END; END IF;
  RETURN (SELECT array_agg(u.type) FROM unnest(p_types) u(type)
      WHERE EXISTS (SELECT FROM ready x WHERE x.type = u.type));
END $$;

-- Leases up to p_want ready lanes and hands out the first operations of each, in order. p_types: only lanes whose
-- first operation is of these; NULL: all. p_together: types that are settled in one transaction each time, so that
-- p_each does not bound them.
-- p_trusted: types that cannot end their process, and need not come one at a time. One row, with a list for each
-- column (a row for each operation costs both sides more than finding it): of lanes, then of operations, which name
-- their lane by number; `depth` is what the lanes held together when they became ready. Lists are texts with commas;
-- what may hold a comma is a JSON array. expire_ms: by id, until it may not start any more, for those that may
-- expire; the caller ends those without running them.
CREATE OR REPLACE FUNCTION claim_ready(
  p_worker uuid, p_want int, p_budget int, p_each int, p_turn smallint, p_types text[], p_together text[],
  p_trusted text[],
  OUT fence bigint, OUT depth bigint, OUT lanes text, OUT queues json, OUT partitions json, OUT careful text,
  OUT ixs text, OUT seqs text, OUT ids text, OUT types text, OUT priorities text, OUT identities json,
  OUT payloads text, OUT waited_ms text, OUT due text, OUT attempts text, OUT max_attempts text,
  OUT timeouts_ms text, OUT traces json, OUT idems text, OUT gates json, OUT expire_ms text
)
  LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_hashjoin = off SET enable_mergejoin = off
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_lanes uuid[]; v_heads bigint[]; v_careful boolean[]; v_queues text[]; v_partitions text[]; v_held boolean[];
  v_stamps bigint[];
  v_own text[]; v_at tid[]; v_stamp bigint; v_most int; v_types text[]; v_ixs int[]; v_seqs bigint[];
  v_identities text[]; v_traces text[]; v_gates text[]; v_gated boolean;
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
    -- Of one type by its own index: 10,000 lanes that others are to run would be passed by one by one, for 4 ms each
    -- time.
    v_at := CASE WHEN cardinality(v_own) = 1 THEN ARRAY(
        SELECT x.ctid FROM ready x WHERE x.type = v_own[1] AND x.priority + 0 >= v_turn
          ORDER BY x.priority + 0, x.stamp LIMIT p_want FOR UPDATE SKIP LOCKED)
      ELSE ARRAY(
        SELECT x.ctid FROM ready x WHERE x.priority >= v_turn AND (p_types IS NULL OR x.type = ANY (p_types))
          ORDER BY x.priority, x.stamp LIMIT p_want FOR UPDATE SKIP LOCKED)
      END;
    WITH d AS (
      DELETE FROM ready x USING unnest(v_at) c(at) WHERE x.ctid = c.at
        RETURNING x.lane, x.stamp, x.type, x.head, x.depth, x.careful, x.queue, x.partition
    )
    SELECT array_agg(d.lane), array_agg(d.stamp), max(d.stamp), array_agg(d.type), array_agg(d.head), sum(d.depth),
      array_agg(d.careful), array_agg(d.queue), array_agg(d.partition)
      INTO v_lanes, v_stamps, v_stamp, v_types, v_heads, depth, v_careful, v_queues, v_partitions FROM d;
    EXIT WHEN v_lanes IS NOT NULL;
  END LOOP;
  IF v_lanes IS NULL THEN RETURN; END IF;
  IF EXISTS (SELECT FROM pauses) THEN
    -- They are claimed to be parked by the settlement. Virtual time goes by what is served: these must not move it.
    SELECT array_agg(x.held), max(x.stamp) FILTER (WHERE NOT x.held) INTO v_held, v_stamp FROM (
      SELECT u.stamp, EXISTS (SELECT FROM pauses p
          WHERE CASE WHEN p.queue = '' THEN p.partition = split_part(u.type, ' ', 1)
        ELSE p.queue = u.queue AND (p.partition IS NULL OR p.partition = u.partition) END) AS held
      FROM unnest(v_stamps, v_queues, v_partitions, v_types) u(stamp, queue, partition, type)) x;
  END IF;
  IF v_stamp > (SELECT s.last_value FROM stamps s) THEN PERFORM setval('stamps', v_stamp); END IF;
  fence := nextval('fences');
  v_most := greatest(1, p_budget / cardinality(v_lanes));
  -- A statement of its own, for a fresh snapshot: the lanes' operations are all committed by now. No ORDER BY: the
  -- nested loop gives them lane by lane, each in order, and the caller checks that.
  SELECT array_agg(h.ix::int), array_agg(o.seq), string_agg(o.id::text, ','), string_agg(o.type, ','),
      string_agg(o.priority::text, ','), array_agg(o.identity), string_agg(o.payload::text, E'\x1e'),
      string_agg((date_part('epoch', t - o.accepted_at) * 1000)::bigint::text, ','),
      string_agg(CASE WHEN o.not_before > t OR h.held THEN '0' ELSE '1' END, ','),
      string_agg(o.attempts::text, ','), string_agg(o.max_attempts::text, ','),
      string_agg(o.timeout_ms::text, ','), array_agg(o.trace), string_agg(coalesce(o.idem::text, ''), ','),
      array_agg(o.gate), bool_or(o.gate IS NOT NULL),
      string_agg(o.id || ' ' || floor(date_part('epoch', o.expires_at - t) * 1000)::bigint, ',')
        FILTER (WHERE o.expires_at IS NOT NULL)
    INTO v_ixs, v_seqs, ids, types, priorities, v_identities, payloads, waited_ms, due, attempts, max_attempts,
      timeouts_ms, v_traces, idems, v_gates, v_gated, expire_ms
  FROM unnest(v_lanes, v_types, v_heads, v_careful, v_held) WITH ORDINALITY h(lane, type, head, careful, held, ix),
    LATERAL (
      SELECT x.seq, x.id, x.type, x.priority, x.identity, x.payload, x.accepted_at, x.not_before, x.attempts,
        x.max_attempts, x.timeout_ms, x.trace, x.idem, x.gate, x.expires_at
      FROM ops x WHERE x.lane = h.lane AND x.seq > h.head ORDER BY x.seq
      LIMIT CASE WHEN h.careful AND NOT h.type = ANY (p_trusted) THEN 1 WHEN h.type = ANY (p_together) THEN v_most
        ELSE least(p_each, v_most) END
    ) o;
  INSERT INTO leases (fence, worker, lanes, uptos, claimed_at)
    SELECT fence, p_worker, array_agg(x.lane), array_agg(x.upto), t FROM (
      SELECT v_lanes[u.ix] AS lane, max(u.seq) AS upto FROM unnest(v_ixs, v_seqs) u(ix, seq) GROUP BY u.ix
        ORDER BY v_lanes[u.ix]) x;
  lanes := array_to_string(v_lanes, ',');
  queues := array_to_json(v_queues); partitions := array_to_json(v_partitions);
  careful := array_to_string(v_careful::int[], ',');
  ixs := array_to_string(v_ixs, ','); seqs := array_to_string(v_seqs, ',');
  identities := array_to_json(v_identities); traces := array_to_json(v_traces);
  IF v_gated THEN gates := array_to_json(v_gates); END IF;
END $$;

-- The same for release 0.2.0, which knows no expiry.
CREATE OR REPLACE FUNCTION claim(
  p_worker uuid, p_want int, p_budget int, p_each int, p_turn smallint, p_types text[], p_together text[],
  p_trusted text[],
  OUT fence bigint, OUT depth bigint, OUT lanes text, OUT queues json, OUT partitions json, OUT careful text,
  OUT ixs text, OUT seqs text, OUT ids text, OUT types text, OUT priorities text, OUT identities json,
  OUT payloads text, OUT waited_ms text, OUT due text, OUT attempts text, OUT max_attempts text,
  OUT timeouts_ms text, OUT traces json, OUT idems text, OUT gates json
)
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT c.fence, c.depth, c.lanes, c.queues, c.partitions, c.careful, c.ixs, c.seqs, c.ids, c.types, c.priorities,
    c.identities, c.payloads, c.waited_ms, c.due, c.attempts, c.max_attempts, c.timeouts_ms, c.traces, c.idems, c.gates
  FROM claim_ready(p_worker, p_want, p_budget, p_each, p_turn, p_types, p_together, p_trusted) c
$$;

-- Records the start of operations that run long. What was handed out after them in their lanes is handed out no more.
CREATE OR REPLACE FUNCTION mark(
  p_worker uuid, m_fence bigint[], m_lane uuid[], m_seq bigint[], m_ago_ms bigint[]
) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  r record;
  t timestamptz := clock();
BEGIN
  FOR r IN SELECT u.fence, array_agg(u.lane) AS lanes, array_agg(u.seq) AS seqs, array_agg(u.ago) AS agos
           FROM unnest(m_fence, m_lane, m_seq, m_ago_ms) u(fence, lane, seq, ago) GROUP BY u.fence ORDER BY u.fence LOOP
    UPDATE leases l SET uptos = (
      SELECT array_agg(coalesce((SELECT g.seq FROM unnest(r.lanes, r.seqs) g(lane, seq)
              WHERE g.lane = z.lane), z.upto) ORDER BY z.i)
      FROM unnest(l.lanes, l.uptos) WITH ORDINALITY z(lane, upto, i))
    WHERE l.fence = r.fence AND l.worker = p_worker;
    CONTINUE WHEN NOT FOUND;
    PERFORM FROM lanes l WHERE l.id = ANY (r.lanes) ORDER BY l.id FOR UPDATE;
    UPDATE lanes l SET running = true WHERE l.id = ANY (r.lanes);
    UPDATE ops o SET started_at = t - g.ago * interval '1 ms' FROM unnest(r.lanes, r.seqs, r.agos) g(lane, seq, ago)
    WHERE o.lane = g.lane AND o.seq = g.seq;
  END LOOP;
END $$;

-- A step of accept. Leases the lanes whose first item runs at once.
CREATE OR REPLACE FUNCTION lease_take(
  p_worker uuid, p_ids uuid[], p_lane int[], p_verdicts text[], p_seqs bigint[], p_at timestamptz
) RETURNS bigint
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_fence bigint := nextval('fences');
BEGIN
  INSERT INTO leases (fence, worker, lanes, uptos, claimed_at)
    SELECT v_fence, p_worker, array_agg(p_ids[u.lane]), array_agg(u.seq), p_at
    FROM unnest(p_lane, p_verdicts, p_seqs) u(lane, verdict, seq) WHERE u.verdict = 'execute';
  RETURN v_fence;
END $$;
