/**
 * `accept`: one call per flush. Decides idempotency, halt, capacity and rate per item and writes what is accepted, in
 * one transaction.
 *
 * Items come grouped by lane, lanes sorted by id (the lock order). Verdicts: 0 queue, 1 execute, 2 apply, 3 refused by
 * capacity, 4 refused by rate, 5 refused by halt, 6 seen before (answer given), 7 key used for another body, 8 first
 * one still in progress.
 *
 * When nothing is scarce every step is one set-based statement; only a flush that does not fit (`v_tight`) walks its
 * items one by one, in order. `apply` items of an empty lane move head with tail and leave no operation; the caller
 * writes their effect in the same transaction.
 */
export const accept = {
  version: 2,
  name: 'accept',
  sql: `
CREATE FUNCTION rate_minutes(p_minutes int[], p_now int, p_keep int) RETURNS int[] LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE
    WHEN cardinality(p_minutes) = 0 THEN ARRAY[p_now]
    WHEN p_minutes[1] > p_now - p_keep THEN
      CASE WHEN p_minutes[cardinality(p_minutes)] >= p_now THEN p_minutes ELSE p_minutes || p_now END
    ELSE coalesce((SELECT array_agg(m ORDER BY m) FROM unnest(p_minutes) m WHERE m > p_now - p_keep AND m < p_now), '{}') || p_now
  END
$$;

CREATE FUNCTION rate_counts(p_minutes int[], p_counts int[], p_now int, p_keep int, p_n int) RETURNS int[] LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE
    WHEN cardinality(p_minutes) = 0 THEN ARRAY[p_n]
    WHEN p_minutes[1] > p_now - p_keep THEN
      CASE WHEN p_minutes[cardinality(p_minutes)] >= p_now
        THEN p_counts[1:cardinality(p_counts) - 1] || (p_counts[cardinality(p_counts)] + p_n)
        ELSE p_counts || p_n END
    ELSE coalesce((SELECT array_agg(c ORDER BY m) FROM unnest(p_minutes, p_counts) u(m, c) WHERE m > p_now - p_keep AND m < p_now), '{}')
      || (p_n + coalesce((SELECT sum(c)::int FROM unnest(p_minutes, p_counts) u(m, c) WHERE m >= p_now), 0))
  END
$$;

CREATE FUNCTION rate_used(p_minutes int[], p_counts int[], p_now int, p_window int) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
  SELECT coalesce(sum(c), 0) FROM unnest(p_minutes, p_counts) u(m, c) WHERE m > p_now - p_window
$$;

-- Milliseconds until the count in the window is at most p_below: the bucket that has to leave leaves it then.
CREATE FUNCTION rate_wait_ms(p_minutes int[], p_counts int[], p_at timestamptz, p_window int, p_below bigint) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
  SELECT greatest(1, ceil(extract(epoch FROM to_timestamp((min(m) + p_window)::bigint * 60) - p_at) * 1000))::bigint
  FROM (
    SELECT m, sum(c) OVER (ORDER BY m DESC) - c AS later
    FROM unnest(p_minutes, p_counts) u(m, c)
    WHERE m > floor(extract(epoch FROM p_at) / 60)::int - p_window AND c > 0
  ) b
  WHERE later <= p_below
$$;

CREATE FUNCTION accept(
  p_worker uuid, p_part smallint, p_apply boolean,
  p_lanes uuid[], p_queues text[], p_partitions text[], p_n bigint[],
  p_lane int[], p_rn bigint[], p_id uuid[], p_type text[], p_priority smallint[], p_stamp bigint[], p_lead bigint[],
  p_identity text[], p_payload text[], p_delay_ms bigint[], p_max_attempts int[], p_timeout_ms int[], p_trace text[],
  p_execute boolean[], p_reason text[], p_pace_ms real[], p_backlog_ms bigint,
  p_keys uuid[], p_requests uuid[], p_key_ttl_ms bigint,
  p_gates text[], p_halts text[],
  p_rate_item int[], p_rate_key uuid[], p_rate_limit int[], p_rate_minutes int[]
) RETURNS TABLE (
  item int, verdict smallint, fence bigint, seq bigint, place bigint, wait_ms bigint, reason text, stamp bigint,
  answer json, op uuid, tier int, rate_left bigint, rate_reset_ms bigint
) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_minute int := floor(extract(epoch FROM t) / 60)::int;
  v_items int := cardinality(p_id);
  v_out smallint[];                -- NULL while everything is live
  v_n bigint[] := p_n;
  v_rn bigint[] := p_rn;
  v_lane int[] := p_lane;
  v_lanes uuid[] := p_lanes;
  v_head bigint[]; v_tail bigint[]; v_running bigint[]; v_depth bigint[]; v_pace real[];
  v_level bigint[] := array_fill(NULL::bigint, ARRAY[10]);
  v_fence bigint; v_mine boolean := false; v_paused boolean;
  v_tight boolean := false;
  v_item int; v_key uuid; v_ok boolean; v_found int; v_k int;
  v_seen_item int[]; v_seen_answer json[]; v_seen_op uuid[];
  v_rkeys uuid[]; v_rlimit bigint[]; v_rleft bigint[]; v_rgave bigint[]; v_rasked bigint[]; v_rkeep int[];
  v_rwait bigint[]; v_tier int[]; v_tleft bigint[]; v_treset bigint[];
  v_gnames text[]; v_gleft bigint[]; v_gave bigint[]; v_gasked bigint[];
  r record;
BEGIN
  -- 1. Idempotency keys, in key order. A key that is there already tells what to answer.
  IF cardinality(p_keys) > 0 THEN
    WITH k AS (
      SELECT u.key, u.request, u.i FROM unnest(p_keys, p_requests) WITH ORDINALITY u(key, request, i)
      WHERE u.key IS NOT NULL ORDER BY u.key
    ), made AS (
      INSERT INTO idempotency AS d (key, request, op, expires_at)
      SELECT k.key, k.request, p_id[k.i], t + p_key_ttl_ms * interval '1 ms' FROM k
      ON CONFLICT (key) DO UPDATE SET request = excluded.request, op = excluded.op, answer = NULL, expires_at = excluded.expires_at
        WHERE d.expires_at <= t
      RETURNING d.key
    )
    SELECT array_agg(k.i::int) INTO v_seen_item FROM k WHERE k.key NOT IN (SELECT made.key FROM made);
    IF v_seen_item IS NOT NULL THEN
      v_out := array_fill(0::smallint, ARRAY[v_items]);
      v_seen_answer := array_fill(NULL::json, ARRAY[v_items]);
      v_seen_op := array_fill(NULL::uuid, ARRAY[v_items]);
      FOR r IN SELECT s.i, d.request = p_requests[s.i] AS same, d.answer, d.op
               FROM unnest(v_seen_item) s(i) LEFT JOIN idempotency d ON d.key = p_keys[s.i] LOOP
        v_out[r.i] := CASE WHEN r.same IS NOT TRUE THEN 7 WHEN r.answer IS NULL THEN 8 ELSE 6 END;
        v_seen_answer[r.i] := r.answer;
        v_seen_op[r.i] := r.op;
      END LOOP;
    END IF;
  END IF;

  -- 2. Halt.
  IF cardinality(p_halts) > 0 AND EXISTS (SELECT FROM halts) THEN
    v_out := coalesce(v_out, array_fill(0::smallint, ARRAY[v_items]));
    FOR v_item IN SELECT u.i FROM unnest(p_halts) WITH ORDINALITY u(scope, i) JOIN halts h ON h.scope = u.scope LOOP
      IF v_out[v_item] = 0 THEN v_out[v_item] := 5; END IF;
    END LOOP;
  END IF;

  -- 3. Rates, in key order: what is asked for is added at once, what does not fit is taken back below.
  IF cardinality(p_rate_key) > 0 THEN
    v_tier := array_fill(NULL::int, ARRAY[v_items]);
    v_tleft := array_fill(NULL::bigint, ARRAY[v_items]);
    v_treset := array_fill(NULL::bigint, ARRAY[v_items]);
    WITH k AS (
      SELECT u.key, count(*) AS n, min(u.most) AS most, max(u.win) AS win
      FROM unnest(p_rate_item, p_rate_key, p_rate_limit, p_rate_minutes) u(i, key, most, win)
      WHERE v_out IS NULL OR v_out[u.i] = 0
      GROUP BY u.key ORDER BY u.key
    ), up AS (
      INSERT INTO rates AS x (key, minutes, counts, expires_at)
      SELECT k.key, ARRAY[v_minute], ARRAY[k.n::int], t + (k.win + 60) * interval '1 minute' FROM k
      ON CONFLICT (key) DO UPDATE SET
        minutes = rate_minutes(x.minutes, v_minute, (extract(epoch FROM excluded.expires_at - t) / 60)::int - 60),
        counts = rate_counts(x.minutes, x.counts, v_minute, (extract(epoch FROM excluded.expires_at - t) / 60)::int - 60, excluded.counts[1]),
        expires_at = excluded.expires_at
      RETURNING x.key, x.minutes, x.counts
    ), sums AS (
      SELECT k.key, k.most, k.n, k.win, rate_used(up.minutes, up.counts, v_minute, k.win) AS used,
        rate_wait_ms(up.minutes, up.counts, t, k.win,
          greatest(0, least(k.most, rate_used(up.minutes, up.counts, v_minute, k.win)) - 1)) AS wait
      FROM up JOIN k ON k.key = up.key
    )
    SELECT array_agg(key ORDER BY key), array_agg(most::bigint ORDER BY key), array_agg(most - (used - n) ORDER BY key),
           array_agg(n ORDER BY key), array_agg(coalesce(wait, 1) ORDER BY key), array_agg(win ORDER BY key), coalesce(bool_or(used > most), false)
      INTO v_rkeys, v_rlimit, v_rleft, v_rasked, v_rwait, v_rkeep, v_tight FROM sums;
    v_rgave := array_fill(0::bigint, ARRAY[coalesce(cardinality(v_rkeys), 0)]);
  END IF;

  -- 4. Gates, in name order.
  IF cardinality(p_gates) > 0 THEN
    SELECT array_agg(g.name ORDER BY g.name), array_agg(CASE WHEN g.overflowing THEN 0 ELSE g.full_at - g.held END ORDER BY g.name),
           array_agg(g.asked ORDER BY g.name), v_tight OR bool_or(g.overflowing OR g.held + g.asked > g.full_at)
      INTO v_gnames, v_gleft, v_gasked, v_tight
    FROM (
      SELECT x.name, x.held, x.full_at, x.overflowing,
        (SELECT count(*) FROM unnest(p_gates) WITH ORDINALITY u(name, i) WHERE u.name = x.name AND (v_out IS NULL OR v_out[u.i] = 0)) AS asked
      FROM gates x WHERE x.name = ANY (p_gates) ORDER BY x.name FOR UPDATE
    ) g;
    IF coalesce(cardinality(v_gnames), 0) <> (SELECT count(DISTINCT u.name) FROM unnest(p_gates) u(name) WHERE u.name IS NOT NULL) THEN
      RAISE EXCEPTION 'a capacity gate is not registered' USING ERRCODE = 'XX000';
    END IF;
    v_gave := array_fill(0::bigint, ARRAY[coalesce(cardinality(v_gnames), 0)]);
  END IF;

  -- 5. Scarce: item by item, in order. Capacity before rate; a refused item takes from neither.
  IF v_tight THEN
    v_out := coalesce(v_out, array_fill(0::smallint, ARRAY[v_items]));
    FOR v_item IN 1 .. v_items LOOP
      CONTINUE WHEN v_out[v_item] <> 0;
      v_k := CASE WHEN cardinality(p_gates) > 0 AND p_gates[v_item] IS NOT NULL THEN array_position(v_gnames, p_gates[v_item]) END;
      IF v_k IS NOT NULL AND v_gleft[v_k] - v_gave[v_k] <= 0 THEN
        v_out[v_item] := 3;
        CONTINUE;
      END IF;
      v_ok := true;
      FOR r IN SELECT array_position(v_rkeys, u.key) AS k, u.i AS tier FROM unnest(p_rate_item, p_rate_key) WITH ORDINALITY u(item, key, i)
               WHERE u.item = v_item LOOP
        IF v_rleft[r.k] - v_rgave[r.k] <= 0 THEN
          v_ok := false;
          -- The tier that frees last decides when to come back.
          IF v_treset[v_item] IS NULL OR v_rwait[r.k] > v_treset[v_item] THEN
            v_tier[v_item] := r.tier; v_tleft[v_item] := 0; v_treset[v_item] := v_rwait[r.k];
          END IF;
        END IF;
      END LOOP;
      IF NOT v_ok THEN
        v_out[v_item] := 4;
        CONTINUE;
      END IF;
      IF v_k IS NOT NULL THEN v_gave[v_k] := v_gave[v_k] + 1; END IF;
      FOR v_found IN SELECT array_position(v_rkeys, u.key) FROM unnest(p_rate_item, p_rate_key) u(item, key) WHERE u.item = v_item LOOP
        v_rgave[v_found] := v_rgave[v_found] + 1;
      END LOOP;
    END LOOP;
    UPDATE rates x SET counts = x.counts[1:cardinality(x.counts) - 1] || (x.counts[cardinality(x.counts)] - u.back::int)
      FROM unnest(v_rkeys, v_rasked, v_rgave) k(key, asked, gave), LATERAL (SELECT k.asked - k.gave) u(back)
      WHERE x.key = k.key AND u.back > 0;
  ELSE
    v_rgave := v_rasked;
    v_gave := v_gasked;
  END IF;
  IF v_gnames IS NOT NULL THEN
    UPDATE gates x SET held = x.held + u.gave, overflowing = x.overflowing OR x.held + u.gave >= x.full_at,
        changed_at = CASE WHEN NOT x.overflowing AND x.held + u.gave >= x.full_at THEN t ELSE x.changed_at END
      FROM unnest(v_gnames, v_gave) u(name, gave) WHERE x.name = u.name AND u.gave > 0;
  END IF;
  IF v_rkeys IS NOT NULL THEN
    -- Per item the tier with the least left, for the RateLimit headers of what was admitted.
    FOR r IN SELECT DISTINCT ON (u.item) u.item, u.i AS tier, v_rleft[k.k] - v_rgave[k.k] AS left_now, v_rwait[k.k] AS wait
             FROM unnest(p_rate_item, p_rate_key) WITH ORDINALITY u(item, key, i), LATERAL (SELECT array_position(v_rkeys, u.key) AS k) k
             WHERE k.k IS NOT NULL ORDER BY u.item, v_rleft[k.k] - v_rgave[k.k], u.i LOOP
      IF v_tier[r.item] IS NULL THEN
        v_tier[r.item] := r.tier; v_tleft[r.item] := greatest(0, r.left_now); v_treset[r.item] := r.wait;
      END IF;
    END LOOP;
  END IF;

  -- 6. What was refused gives its key back and leaves its lane's count.
  IF v_out IS NOT NULL THEN
    DELETE FROM idempotency d USING unnest(p_keys, v_out) u(key, o) WHERE d.key = u.key AND u.o IN (3, 4, 5);
    SELECT array_agg(coalesce(x.rn, 0) ORDER BY x.i) INTO v_rn FROM (
      SELECT u.i, CASE WHEN u.o = 0 THEN row_number() OVER (PARTITION BY u.lane, u.o = 0 ORDER BY u.i) END AS rn
      FROM unnest(p_lane, v_out) WITH ORDINALITY u(lane, o, i)) x;
    SELECT array_agg(coalesce(x.n, 0) ORDER BY l.i) INTO v_n
      FROM generate_series(1, cardinality(p_lanes)) l(i)
      LEFT JOIN (SELECT u.lane, count(*) AS n FROM unnest(p_lane, v_out) u(lane, o) WHERE u.o = 0 GROUP BY u.lane) x ON x.lane = l.i;
  END IF;

  -- 7. May this process hold leases? Its row keeps its place until we commit.
  IF true = ANY (p_execute) AND NOT p_apply THEN
    PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
    v_mine := FOUND;
    IF v_mine THEN v_fence := nextval('fences'); END IF;
  END IF;
  v_paused := EXISTS (SELECT FROM pauses);

  -- 8. Lanes, in id order: the sequence is given here, under the lane's lock.
  WITH up AS (
    INSERT INTO lanes AS l (id, queue, partition, head, tail, depth, moved_at)
    SELECT u.id, u.queue, u.partition, CASE WHEN p_apply THEN u.n ELSE 0 END, u.n, CASE WHEN p_apply THEN 0 ELSE u.n END, t
    FROM unnest(p_lanes, p_queues, p_partitions, v_n) u(id, queue, partition, n) WHERE u.n > 0
    ON CONFLICT (id) DO UPDATE SET
      tail = l.tail + excluded.tail,
      head = CASE WHEN p_apply AND l.depth = 0 THEN l.tail + excluded.tail ELSE l.head END,
      depth = CASE WHEN p_apply AND l.depth = 0 THEN 0 ELSE l.depth + excluded.tail END,
      moved_at = CASE WHEN l.depth = 0 THEN t ELSE l.moved_at END
    RETURNING l.id, l.head, l.tail, l.depth, l.pace_ms
  )
  SELECT array_agg(up.id ORDER BY up.id), array_agg(up.head ORDER BY up.id), array_agg(up.tail ORDER BY up.id),
         array_agg(up.depth ORDER BY up.id), array_agg(coalesce(up.pace_ms, -1) ORDER BY up.id)
    INTO v_lanes, v_head, v_tail, v_depth, v_pace FROM up;
  IF cardinality(v_lanes) IS DISTINCT FROM cardinality(p_lanes) THEN
    -- Some lanes got nothing: renumber the items' lanes to those that are left.
    SELECT array_agg(coalesce(array_position(v_lanes, p_lanes[u.lane]), 0) ORDER BY u.i) INTO v_lane FROM unnest(p_lane) WITH ORDINALITY u(lane, i);
    SELECT array_agg(u.n ORDER BY u.i) INTO v_n FROM unnest(v_n) WITH ORDINALITY u(n, i) WHERE u.n > 0;
  END IF;

  -- What runs already is not in front of anybody: place 0 is the next to run.
  SELECT array_agg(CASE WHEN u.depth > u.n THEN
      (SELECT count(f.started_at) FROM (SELECT o.started_at FROM ops o WHERE o.lane = u.id AND o.seq > u.head ORDER BY o.seq LIMIT 1) f)
      ELSE 0 END ORDER BY u.i)
    INTO v_running FROM unnest(v_lanes, v_head, v_depth, v_n) WITH ORDINALITY u(id, head, depth, n, i);

  -- 9. The virtual time of each priority level in this flush.
  FOR v_k IN SELECT DISTINCT u.p FROM unnest(p_priority) u(p) LOOP
    v_level[v_k] := coalesce((SELECT x.stamp FROM ready x WHERE x.priority = v_k ORDER BY x.stamp LIMIT 1), (SELECT s.last_value FROM stamps s));
  END LOOP;

  -- 10. How many are held now.
  FOR r IN SELECT u.type, count(*) AS n FROM unnest(p_type, v_lane, coalesce(v_out, array_fill(0::smallint, ARRAY[v_items]))) u(type, lane, o)
           WHERE u.o = 0 AND (NOT p_apply OR v_depth[u.lane] > 0) GROUP BY u.type LOOP
    IF p_part >= 0 THEN
      UPDATE tallies x SET n = x.n + r.n WHERE x.worker = p_worker AND x.part = p_part AND x.type = r.type;
    END IF;
    IF p_part < 0 OR NOT FOUND THEN
      INSERT INTO tallies (worker, part, type, n) VALUES (p_worker, p_part, r.type, r.n);
    END IF;
  END LOOP;

  -- 11. Write the operations and tell each item what became of it.
  RETURN QUERY
  WITH item AS MATERIALIZED (
    SELECT u.i, v_lanes[u.lane] AS lane, v_tail[u.lane] - v_n[u.lane] + u.rn AS seq, u.rn,
      CASE WHEN p_apply THEN v_depth[u.lane] = 0 ELSE v_depth[u.lane] = v_n[u.lane] END AS empty,
      greatest(0, v_depth[u.lane] - v_n[u.lane] - v_running[u.lane] + u.rn - 1) AS place,
      CASE WHEN p_apply AND v_depth[u.lane] = 0 THEN 2
           WHEN v_mine AND u.execute AND u.rn = 1 AND v_depth[u.lane] = v_n[u.lane]
             AND (NOT v_paused OR NOT EXISTS (SELECT FROM pauses s JOIN lanes l ON l.id = v_lanes[u.lane]
                  WHERE s.queue = l.queue AND (s.partition IS NULL OR s.partition = l.partition))) THEN 1
           ELSE 0 END::smallint AS verdict,
      u.id, u.type, u.priority, greatest(u.stamp, v_level[u.priority] + u.lead) AS stamp, u.identity, u.payload, u.delay_ms,
      u.max_attempts, u.timeout_ms, u.trace, u.reason, u.key, u.gate,
      (u.delay_ms + greatest(CASE WHEN v_pace[u.lane] < 0 THEN u.pace_ms ELSE v_pace[u.lane] END
        * (v_depth[u.lane] - v_n[u.lane] + u.rn), p_backlog_ms))::bigint AS wait_ms
    FROM unnest(v_lane, v_rn, p_id, p_type, p_priority, p_stamp, p_lead, p_identity, p_payload, p_delay_ms, p_max_attempts,
                p_timeout_ms, p_trace, p_execute, p_reason, p_pace_ms, p_keys, p_gates, v_out) WITH ORDINALITY
      u(lane, rn, id, type, priority, stamp, lead, identity, payload, delay_ms, max_attempts,
        timeout_ms, trace, execute, reason, pace_ms, key, gate, o, i)
    WHERE coalesce(u.o, 0) = 0
  ), told AS MATERIALIZED (
    -- Order before load: what stands behind something is told so, unless it asked to be queued.
    SELECT item.*, CASE WHEN item.verdict <> 0 THEN NULL
      WHEN item.reason = 'requested' THEN 'requested'
      WHEN NOT item.empty OR item.rn > 1 THEN 'maintaining_order'
      WHEN item.reason <> '' THEN item.reason
      WHEN v_paused THEN 'maintaining_order'
      ELSE 'system_busy' END AS why FROM item
  ), wrote AS (
    INSERT INTO ops (lane, seq, id, type, priority, stamp, identity, payload, accepted_at, not_before, started_at, max_attempts, timeout_ms, trace, idem, gate)
    SELECT x.lane, x.seq, x.id, x.type, x.priority, x.stamp, x.identity, x.payload::json, t,
      CASE WHEN x.delay_ms > 0 THEN t + x.delay_ms * interval '1 ms' END, CASE WHEN x.verdict = 1 THEN t END,
      x.max_attempts, x.timeout_ms, x.trace, x.key, x.gate
    FROM item x WHERE x.verdict < 2
  ), readied AS (
    INSERT INTO ready (lane, priority, stamp)
    SELECT x.lane, x.priority, x.stamp FROM item x WHERE x.verdict = 0 AND x.rn = 1 AND x.empty AND x.delay_ms = 0
  ), put_aside AS (
    INSERT INTO parked (lane, until, reason)
    SELECT x.lane, t + x.delay_ms * interval '1 ms', 'delay' FROM item x WHERE x.verdict = 0 AND x.rn = 1 AND x.empty AND x.delay_ms > 0
  ), leased AS (
    INSERT INTO leases (fence, worker, lanes, uptos, claimed_at)
    SELECT v_fence, p_worker, array_agg(x.lane), array_agg(x.seq), t FROM item x WHERE x.verdict = 1 HAVING count(*) > 0
  ), answered AS (
    UPDATE idempotency d SET answer = json_build_object('v', 'queue', 'place', x.place, 'wait_ms', x.wait_ms, 'reason', x.why)
    FROM told x WHERE x.key IS NOT NULL AND x.verdict = 0 AND d.key = x.key
  )
  SELECT x.i::int, x.verdict, CASE WHEN x.verdict = 1 THEN v_fence END, x.seq, x.place, x.wait_ms, x.why, x.stamp, NULL::json, x.id,
    v_tier[x.i], v_tleft[x.i], v_treset[x.i]
  FROM told x
  UNION ALL
  SELECT u.i::int, u.o, NULL, NULL, NULL, NULL, NULL, NULL, v_seen_answer[u.i], v_seen_op[u.i], v_tier[u.i], v_tleft[u.i], v_treset[u.i]
  FROM unnest(v_out) WITH ORDINALITY u(o, i) WHERE u.o <> 0;
END $$;
`,
}
