-- accept: one call per flush. Decides idempotency, halt, capacity and rate per item, and writes what is accepted, in
-- one
-- transaction.
--
-- Items come grouped by lane, and lanes sorted by id (the lock order). Verdicts: 0 queue, 1 execute, 2 apply, 3
-- refused by
-- capacity, 4 refused by rate, 5 refused by halt, 6 seen before (the stored answer is returned), 7 key used for another
-- body, 8 the first request is still in progress, 9 refused because the waiting limit is reached.
--
-- Reasons given with the items: '' may run now and answers with its result; '+requested' and '+still_running' may run
-- now
-- and answer with a ticket; all others are queued.
--
-- If nothing is scarce, every step is one set-based statement. Only a flush that does not fit (v_tight) walks its items
-- one by one, in order. 'apply' items of an empty lane that may run now move head with tail and leave no operation; the
-- caller writes their effect in the same transaction.

CREATE OR REPLACE FUNCTION accept(
  p_worker uuid, p_part smallint, p_apply boolean,
  p_lanes uuid[], p_queues text[], p_partitions text[], p_n bigint[], p_first_execute boolean[],
  p_lane int[], p_rn bigint[], p_id uuid[], p_type text[], p_priority smallint[], p_stamp bigint[], p_lead bigint[],
  p_identity text[], p_payload text[], p_delay_ms bigint[], p_max_attempts int[], p_timeout_ms int[], p_trace text[],
  p_reason text[], p_pace_ms real[], p_backlog_ms bigint, p_levels smallint[], p_types text[], p_type_counts bigint[],
  p_keys uuid[], p_requests uuid[], p_key_ttl_ms bigint,
  p_gates text[], p_halts text[],
  -- each key once, in order, and how often it is asked for
  p_rate_key uuid[], p_rate_n int[], p_rate_limit int[], p_rate_minutes int[], p_rate_keep int[],
  -- per tier its key, and its item; no items: one tier each
  p_rate_ix int[], p_rate_item int[],
  -- nothing more may wait; which items are refused together
  p_full boolean, p_batch int[],
  -- One row of arrays, an element per item: parsing rows costs the caller more than the rest together.
  OUT verdicts smallint[], OUT fence bigint, OUT seqs bigint[], OUT places bigint[], OUT waits_ms bigint[],
    OUT reasons text[], OUT stamps bigint[],
  OUT answers json[], OUT ops uuid[], OUT tiers int[], OUT rates_left bigint[], OUT rates_reset_ms bigint[],
    OUT at_ms bigint
) LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET jit = off AS $$
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
  v_execute boolean[] := p_first_execute;
  v_tail bigint[]; v_running int[]; v_depth bigint[]; v_pace real[]; v_blocked bigint[]; v_queues text[];
  v_partitions text[];
  v_level bigint[] := '{NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL}';
  v_mine boolean := false; v_executing boolean := false; v_readying boolean; v_delaying boolean; v_all boolean;
  v_paused boolean;
  v_tight boolean := false;
  v_item int; v_ok boolean; v_found int; v_k int;
  v_seen_item int[]; v_wrong smallint[];
  v_rleft int[]; v_rgave int[]; v_rasked int[] := p_rate_n; v_rwait bigint[]; v_ritem int[] := p_rate_item;
  v_odd boolean := false; v_longer boolean;
  v_single boolean := cardinality(p_rate_item) = 0;
  v_gnames text[]; v_gleft bigint[]; v_gave bigint[]; v_gasked bigint[];
  r record;
BEGIN
  -- 0. May this process hold leases? Its row keeps its place until we commit.
  IF NOT p_apply AND p_reason && '{"",+requested,+still_running}' THEN
    PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
    v_mine := FOUND;
  END IF;

  -- 1. Idempotency keys, in key order. A key that is there already tells what to answer.
  IF cardinality(p_keys) > 0 THEN
    WITH k AS (
      SELECT u.key, u.request, u.i FROM unnest(p_keys, p_requests) WITH ORDINALITY u(key, request, i)
      WHERE u.key IS NOT NULL ORDER BY u.key
    ), made AS (
      INSERT INTO idempotency AS d (key, request, op, expires_at)
      SELECT k.key, k.request, p_id[k.i], t + p_key_ttl_ms * interval '1 ms' FROM k
      ON CONFLICT (key)
        DO UPDATE SET request = excluded.request, op = excluded.op, answer = NULL, expires_at = excluded.expires_at
        WHERE d.expires_at <= t
      RETURNING d.key
    )
    SELECT array_agg(k.i::int) INTO v_seen_item FROM k WHERE k.key NOT IN (SELECT made.key FROM made);
    IF v_seen_item IS NOT NULL THEN
      v_out := array_fill(0::smallint, ARRAY[v_items]);
      answers := array_fill(NULL::json, ARRAY[v_items]);
      ops := array_fill(NULL::uuid, ARRAY[v_items]);
      FOR r IN SELECT s.i, d.request = p_requests[s.i] AS same, d.answer, d.op
               FROM unnest(v_seen_item) s(i) LEFT JOIN idempotency d ON d.key = p_keys[s.i] LOOP
        v_out[r.i] := CASE WHEN r.same IS NOT TRUE THEN 7 WHEN r.answer IS NULL THEN 8 ELSE 6 END;
        answers[r.i] := r.answer;
        ops[r.i] := r.op;
      END LOOP;
      -- A batch is one request, and has one answer: what is wrong with a key of it is wrong with all of it.
      IF cardinality(p_batch) > 0 AND v_out && '{7,8}' THEN
        SELECT array_agg(coalesce(b.o, u.o) ORDER BY u.i) INTO v_wrong
          FROM unnest(p_batch, v_out) WITH ORDINALITY u(batch, o, i)
          LEFT JOIN (SELECT x.batch, max(x.o) AS o FROM unnest(p_batch, v_out) x(batch, o) WHERE x.o IN (7, 8)
              GROUP BY x.batch) b ON b.batch = u.batch;
        DELETE FROM idempotency d USING unnest(p_keys, p_id, v_out, v_wrong) u(key, op, o, wrong)
          WHERE u.o = 0 AND u.wrong <> 0 AND d.key = u.key AND d.op = u.op;
        v_out := v_wrong;
      END IF;
    END IF;
  END IF;

  -- 2. Halt. Whoever halts waits for those who are past this point: behind a halt nothing is accepted any more.
  IF cardinality(p_halts) > 0 THEN
    PERFORM pg_advisory_xact_lock_shared(hashtext('spillway.halts'), hashtext(current_schema()));
    FOR v_item IN SELECT u.i FROM unnest(p_halts) WITH ORDINALITY u(scope, i) JOIN halts h ON h.scope = u.scope LOOP
      v_out := coalesce(v_out, array_fill(0::smallint, ARRAY[v_items]));
      IF v_out[v_item] = 0 THEN v_out[v_item] := 5; END IF;
    END LOOP;
  END IF;

  -- Full: what would have to wait is refused, with all of its batch. Without locks, which would come before those of
  -- the rates: a lane that fills up at this moment takes one more.
  IF p_full THEN
    v_out := coalesce(v_out, array_fill(0::smallint, ARRAY[v_items]));
    WITH waiting AS (
      SELECT DISTINCT u.batch FROM unnest(p_batch, p_lane, p_reason, v_out) u(batch, lane, reason, o)
      WHERE u.o = 0 AND (u.reason <> '' OR EXISTS (SELECT FROM lanes l WHERE l.id = p_lanes[u.lane] AND l.depth > 0)
        OR EXISTS (SELECT FROM pauses s WHERE CASE WHEN s.queue = '' THEN s.partition = p_type[1]
                     ELSE s.queue = p_queues[u.lane]
                       AND (s.partition IS NULL OR s.partition = p_partitions[u.lane]) END))
    )
    SELECT array_agg(CASE WHEN u.o = 0 AND u.batch IN (SELECT w.batch FROM waiting w) THEN 9 ELSE u.o END::smallint)
      INTO v_out
      FROM unnest(p_batch, v_out) u(batch, o);
  END IF;

  -- 3. Rates, in key order: what is asked for is added at once, what does not fit is taken back below.
  IF cardinality(p_rate_key) > 0 THEN
    IF v_out IS NOT NULL THEN
      SELECT array_agg(coalesce(x.n, 0) ORDER BY k.i) INTO v_rasked
        FROM generate_series(1, cardinality(p_rate_key)) k(i)
        LEFT JOIN (SELECT u.ix, count(*) AS n FROM unnest(p_rate_ix, v_ritem) WITH ORDINALITY u(ix, item, i)
                   WHERE v_out[coalesce(u.item, u.i)] = 0 GROUP BY u.ix) x ON x.ix = k.i;
    END IF;
    WITH up AS (
      INSERT INTO rates AS x (key, win, minutes, counts, total, expires_at, sweep_at)
      SELECT k.key, k.win, ARRAY[v_minute], ARRAY[k.n], k.n, t + k.keep * interval '1 minute',
        t + k.keep * interval '1 minute'
          FROM unnest(p_rate_key, v_rasked, p_rate_minutes, p_rate_keep) k(key, n, win, keep)
      ON CONFLICT (key) DO UPDATE SET
        minutes = CASE WHEN x.minutes[1] > v_minute - excluded.win
          THEN CASE WHEN x.minutes[cardinality(x.minutes)] >= v_minute THEN x.minutes ELSE x.minutes || v_minute END
          ELSE rate_minutes(x.minutes, v_minute,
              rate_span(x.win, excluded.win, greatest(x.expires_at, excluded.expires_at) - t)) END,
        counts = CASE WHEN x.minutes[1] > v_minute - excluded.win
          THEN CASE WHEN x.minutes[cardinality(x.minutes)] >= v_minute
            THEN x.counts[1:cardinality(x.counts) - 1] || (x.counts[cardinality(x.counts)] + excluded.total)
              ELSE x.counts || excluded.total END
          ELSE rate_counts(x.minutes, x.counts, v_minute,
              rate_span(x.win, excluded.win, greatest(x.expires_at, excluded.expires_at) - t), excluded.total) END,
        total = excluded.total + CASE WHEN x.minutes[1] > v_minute - excluded.win THEN x.total
          ELSE rate_used(x.minutes, x.counts, v_minute,
              rate_span(x.win, excluded.win, greatest(x.expires_at, excluded.expires_at) - t))::int END,
        win = rate_span(x.win, excluded.win, greatest(x.expires_at, excluded.expires_at) - t),
          expires_at = greatest(x.expires_at, excluded.expires_at)
      RETURNING x.total, x.minutes[1] AS first, x.counts[1] AS first_n
    ),
    seen AS (SELECT array_agg(up.total) AS totals, array_agg(up.first) AS firsts, array_agg(up.first_n) AS first_ns
        FROM up)
    -- When the next slot is free: when the oldest bucket leaves. One that was emptied by refunds is looked at below.
    SELECT array_agg(u.most - (u.total - u.asked)), coalesce(bool_or(u.total > u.most), false),
      bool_or(u.first_n = 0), bool_or(u.first <= v_minute - u.win),
           array_agg(greatest(1, ceil(((u.first + u.win)::bigint * 60 - date_part('epoch', t)) * 1000))::bigint)
      INTO v_rleft, v_tight, v_odd, v_longer, v_rwait
    FROM seen, unnest(seen.totals, v_rasked, p_rate_limit, p_rate_minutes, seen.firsts, seen.first_ns) u(total,
        asked, most, win, first, first_n);
    IF v_longer THEN
      -- Some keep more than the window of this process: only what is in it counts here.
      v_odd := true;
      SELECT array_agg(u.most - (k.used - u.asked) ORDER BY u.i), bool_or(k.used > u.most) INTO v_rleft, v_tight
      FROM unnest(p_rate_key, v_rasked, p_rate_limit, p_rate_minutes) WITH ORDINALITY u(key, asked, most, win, i)
      JOIN rates x ON x.key = u.key,
        LATERAL (SELECT rate_used(x.minutes, x.counts, v_minute, u.win)::int) k(used);
    END IF;
    v_rgave := array_fill(0, ARRAY[cardinality(p_rate_key)]);
  END IF;

  -- 4. Gates, in name order.
  IF cardinality(p_gates) > 0 THEN
    SELECT array_agg(g.name ORDER BY g.name), array_agg(CASE WHEN g.overflowing THEN 0 ELSE g.full_at - g.held END
        ORDER BY g.name),
           array_agg(g.asked ORDER BY g.name), v_tight OR bool_or(g.overflowing OR g.held + g.asked > g.full_at)
      INTO v_gnames, v_gleft, v_gasked, v_tight
    FROM (
      SELECT x.name, x.held, x.full_at, x.overflowing,
        (SELECT count(*) FROM unnest(p_gates) WITH ORDINALITY u(name, i)
            WHERE u.name = x.name AND (v_out IS NULL OR v_out[u.i] = 0)) AS asked
      FROM gates x WHERE x.name = ANY (p_gates) ORDER BY x.name FOR UPDATE
    ) g;
    IF coalesce(cardinality(v_gnames), 0) <> (SELECT count(DISTINCT u.name) FROM unnest(p_gates) u(name)
        WHERE u.name IS NOT NULL) THEN
      RAISE EXCEPTION 'a capacity gate is not registered' USING ERRCODE = 'XX000';
    END IF;
    v_gave := array_fill(0::bigint, ARRAY[coalesce(cardinality(v_gnames), 0)]);
  END IF;

  -- 5. Scarce: item by item, in order. Capacity before rate; a refused item takes from neither.
  IF v_tight THEN
    v_out := coalesce(v_out, array_fill(0::smallint, ARRAY[v_items]));
    FOR v_item IN 1 .. v_items LOOP
      CONTINUE WHEN v_out[v_item] <> 0;
      v_k := CASE WHEN cardinality(p_gates) > 0
        AND p_gates[v_item] IS NOT NULL THEN array_position(v_gnames, p_gates[v_item]) END;
      IF v_k IS NOT NULL AND v_gleft[v_k] - v_gave[v_k] <= 0 THEN
        v_out[v_item] := 3;
        CONTINUE;
      END IF;
      v_ok := true;
      FOR v_found IN SELECT u.ix FROM unnest(p_rate_ix, v_ritem) WITH ORDINALITY u(ix, item, i)
        WHERE coalesce(u.item, u.i) = v_item LOOP
        v_ok := v_ok AND v_rleft[v_found] - v_rgave[v_found] > 0;
      END LOOP;
      IF NOT v_ok THEN
        v_out[v_item] := 4;
        CONTINUE;
      END IF;
      IF v_k IS NOT NULL THEN v_gave[v_k] := v_gave[v_k] + 1; END IF;
      FOR v_found IN SELECT u.ix FROM unnest(p_rate_ix, v_ritem) WITH ORDINALITY u(ix, item, i)
        WHERE coalesce(u.item, u.i) = v_item LOOP
        v_rgave[v_found] := v_rgave[v_found] + 1;
      END LOOP;
    END LOOP;
    UPDATE rates x
      SET counts = x.counts[1:cardinality(x.counts) - 1] || (x.counts[cardinality(x.counts)] - u.back),
        total = x.total - u.back
      FROM unnest(p_rate_key, v_rasked, v_rgave) k(key, asked, gave), LATERAL (SELECT k.asked - k.gave) u(back)
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
  IF v_rleft IS NOT NULL THEN
    at_ms := floor(extract(epoch FROM t) * 1000);
    IF v_tight OR v_odd THEN
      -- Per key, now that the refused ones are out of the count.
      -- A slot is free when fewer than the limit count; after it was lowered more may count than it allows.
      SELECT array_agg(coalesce(rate_wait_ms(x.minutes, x.counts, t, u.win,
              greatest(0, least(rate_used(x.minutes, x.counts, v_minute, u.win), u.most) - 1)), 1) ORDER BY u.i)
        INTO v_rwait
          FROM unnest(p_rate_key, p_rate_minutes, p_rate_limit) WITH ORDINALITY u(key, win, most, i)
          JOIN rates x ON x.key = u.key;
    END IF;
    IF v_single THEN
      SELECT array_agg(u.i), array_agg(greatest(0, v_rleft[u.ix] - v_rgave[u.ix])), array_agg(v_rwait[u.ix])
        INTO tiers, rates_left, rates_reset_ms FROM unnest(p_rate_ix) WITH ORDINALITY u(ix, i);
    ELSE
      tiers := array_fill(NULL::int, ARRAY[v_items]);
      rates_left := array_fill(NULL::bigint, ARRAY[v_items]);
      rates_reset_ms := array_fill(NULL::bigint, ARRAY[v_items]);
      -- Per item the tier that matters: of a refused one, among those that are used up, the one that frees last (it
      -- says when to come back); of an admitted one the one with the least left.
      FOR r IN SELECT DISTINCT ON (u.item) u.item, u.i AS tier, greatest(0, k.left_now) AS left_now, k.wait
               FROM unnest(p_rate_item, p_rate_ix) WITH ORDINALITY u(item, ix, i),
                 LATERAL (SELECT v_rleft[u.ix] - v_rgave[u.ix] AS left_now, v_rwait[u.ix] AS wait) k
               ORDER BY u.item, least(1, greatest(0, k.left_now)), CASE
                 WHEN v_out[u.item] = 4 THEN - k.wait END, k.left_now, u.i LOOP
        tiers[r.item] := r.tier; rates_left[r.item] := r.left_now; rates_reset_ms[r.item] := r.wait;
      END LOOP;
    END IF;
  END IF;

  -- 6. What was refused gives its key back and leaves its lane's count.
  IF v_out IS NOT NULL THEN
    DELETE FROM idempotency d USING unnest(p_keys, v_out) u(key, o) WHERE d.key = u.key AND u.o IN (3, 4, 5, 9);
    SELECT array_agg(coalesce(x.rn, 0) ORDER BY x.i) INTO v_rn FROM (
      SELECT u.i, CASE WHEN u.o = 0 THEN row_number() OVER (PARTITION BY u.lane, u.o = 0 ORDER BY u.i) END AS rn
      FROM unnest(p_lane, v_out) WITH ORDINALITY u(lane, o, i)) x;
    SELECT array_agg(coalesce(x.n, 0) ORDER BY l.i),
           -- Whether the first that is left may run at once; the first that came may have been refused.
           array_agg(coalesce(x.execute, false) ORDER BY l.i) INTO v_n, v_execute
      FROM generate_series(1, cardinality(p_lanes)) l(i)
      LEFT JOIN (SELECT u.lane, count(*) AS n,
          (array_agg(u.reason IN ('', '+requested', '+still_running') ORDER BY u.i))[1] AS execute
                 FROM unnest(p_lane, v_out, p_reason) WITH ORDINALITY u(lane, o, reason, i) WHERE u.o = 0
                 GROUP BY u.lane) x ON x.lane = l.i;
  END IF;

  -- 7. Which lanes' first items may run now: not those that an operator holds back.
  v_paused := EXISTS (SELECT FROM pauses);
  IF NOT v_mine AND NOT p_apply THEN
    v_execute := array_fill(false, ARRAY[cardinality(p_lanes)]);
  ELSIF v_paused THEN
    SELECT array_agg(u.execute AND NOT EXISTS (SELECT FROM pauses s
          WHERE CASE WHEN s.queue = '' THEN p_apply AND s.partition = p_type[1]
               ELSE s.queue = u.queue AND (s.partition IS NULL OR s.partition = u.partition) END) ORDER BY u.i)
      INTO v_execute FROM unnest(p_queues, p_partitions, v_execute) WITH ORDINALITY u(queue, partition, execute, i);
  END IF;

  -- 8. Lanes, in id order: the sequence is given here, under the lane's lock.
  WITH up AS (
    INSERT INTO lanes AS l (id, queue, partition, head, tail, depth, running, moved_at, sweep_at)
    SELECT u.id, u.queue, u.partition, CASE WHEN p_apply AND u.execute THEN u.n ELSE 0 END, u.n, CASE
      WHEN p_apply AND u.execute THEN 0 ELSE u.n END, v_mine AND u.execute, t, t + interval '1 hour'
    FROM unnest(p_lanes, p_queues, p_partitions, v_n, v_execute) u(id, queue, partition, n, execute) WHERE u.n > 0
    ON CONFLICT (id) DO UPDATE SET
      tail = l.tail + excluded.tail,
      -- excluded.head says that these may be applied at once.
      head = CASE WHEN excluded.head > 0 AND l.depth = 0 THEN l.tail + excluded.tail ELSE l.head END,
      depth = CASE WHEN excluded.head > 0 AND l.depth = 0 THEN 0 ELSE l.depth + excluded.tail END,
      running = CASE WHEN l.depth = 0 THEN excluded.running ELSE l.running END,
      moved_at = CASE WHEN l.depth = 0 THEN t ELSE l.moved_at END
    RETURNING l.id, l.tail, l.depth, l.running, l.pace_ms, l.queue, l.partition,
      -- For how long its head is delayed or waits for its next attempt. How long a pause lasts, nobody knows.
      CASE WHEN l.depth > 1 AND NOT l.running THEN (SELECT (date_part('epoch', x.until - t) * 1000)::bigint
          FROM parked x
        WHERE x.lane = l.id AND x.reason <> 'pause') END AS blocked_ms
  )
  SELECT array_agg(up.id), array_agg(up.tail), array_agg(up.depth), array_agg(up.running::int),
    array_agg(coalesce(up.pace_ms, -1)),
    array_agg(up.queue), array_agg(up.partition), array_agg(up.blocked_ms)
    INTO v_lanes, v_tail, v_depth, v_running, v_pace, v_queues, v_partitions, v_blocked FROM up;
  IF v_lanes IS DISTINCT FROM p_lanes THEN
    -- Some lanes got nothing: renumber the items' lanes to those that are left.
    SELECT array_agg(coalesce(array_position(v_lanes, p_lanes[u.lane]), 0) ORDER BY u.i) INTO v_lane
      FROM unnest(p_lane) WITH ORDINALITY u(lane, i);
    SELECT array_agg(u.n ORDER BY u.i) INTO v_n FROM unnest(v_n) WITH ORDINALITY u(n, i) WHERE u.n > 0;
  END IF;

  -- 9. The virtual time of each priority level in this flush: the smallest stamp that waits there.
  FOREACH v_k IN ARRAY p_levels LOOP
    v_level[v_k] := coalesce((SELECT x.stamp FROM ready x WHERE x.priority = v_k ORDER BY x.stamp
          LIMIT 1), (SELECT s.last_value FROM stamps s));
  END LOOP;

  -- 10. What becomes of each item. A lane that is empty but for what this flush brings starts with the item of rn 1;
  -- what runs is in nobody's way: place 0 is the next to run. No ORDER BY: a function scan gives its rows in order,
  -- and sorting each array would cost more than making it.
  SELECT array_agg(x.verdict), array_agg(x.seq),
         array_agg(greatest(0, x.before + x.rn - 1 - x.running)),
         array_agg((greatest(x.delay_ms, x.blocked_ms) + greatest(x.pace * (x.before + x.rn), p_backlog_ms))::bigint),
         array_agg(x.stamp),
         -- Order before load: what stands behind something is told so, unless it asked to be queued.
         array_agg(CASE WHEN x.reason IN ('requested', '+requested') THEN 'requested'
           WHEN x.reason = '+still_running' AND x.verdict = 1 THEN 'still_running'
           WHEN x.before > 0 OR x.rn > 1 THEN 'maintaining_order'
           WHEN x.reason NOT IN ('', '+still_running') THEN x.reason
           WHEN v_paused THEN 'maintaining_order' ELSE 'system_busy' END),
         bool_or(x.verdict = 1), bool_or(x.verdict = 0 AND x.rn = 1 AND x.before = 0), max(x.delay_ms) > 0,
           bool_and(x.verdict < 2)
    INTO verdicts, seqs, places, waits_ms, stamps, reasons, v_executing, v_readying, v_delaying, v_all
  FROM (
    SELECT u.i, u.rn, u.reason, u.delay_ms, v_blocked[u.lane] AS blocked_ms, v_running[u.lane] AS running,
      CASE WHEN p_apply AND v_depth[u.lane] = 0 THEN 0 ELSE v_depth[u.lane] - v_n[u.lane] END AS before,
      v_tail[u.lane] - v_n[u.lane] + u.rn AS seq,
      CASE WHEN v_pace[u.lane] < 0 THEN u.pace_ms ELSE v_pace[u.lane] END AS pace,
      greatest(u.stamp, v_level[u.priority] + u.lead) AS stamp,
      (CASE WHEN u.o <> 0 THEN u.o
           WHEN p_apply AND v_depth[u.lane] = 0 THEN 2
           WHEN u.rn = 1 AND v_mine AND v_running[u.lane] = 1 AND v_depth[u.lane] = v_n[u.lane] THEN 1
           ELSE 0 END)::smallint AS verdict
    FROM unnest(v_lane, v_rn, p_priority, p_stamp, p_lead, p_delay_ms, p_reason, p_pace_ms, v_out) WITH ORDINALITY
      u(lane, rn, priority, stamp, lead, delay_ms, reason, pace_ms, o, i)
  ) x;

  -- 11. Write the operations, and put the lanes that were empty where they belong.
  INSERT INTO ops (lane, seq, id, type, priority, stamp, identity, payload, accepted_at, not_before, started_at,
      max_attempts, timeout_ms, trace, idem, gate)
  SELECT v_lanes[u.lane], u.seq, u.id, u.type, u.priority, u.stamp, u.identity, u.payload::json, t,
    CASE WHEN u.delay_ms > 0 THEN t + u.delay_ms * interval '1 ms' END, CASE WHEN u.verdict = 1 THEN t END,
    u.max_attempts, u.timeout_ms, u.trace, u.key, u.gate
  FROM unnest(v_lane, verdicts, seqs, stamps, p_id, p_type, p_priority, p_identity, p_payload, p_delay_ms,
      p_max_attempts,
              p_timeout_ms, p_trace, p_keys, p_gates)
    u(lane, verdict, seq, stamp, id, type, priority, identity, payload, delay_ms, max_attempts, timeout_ms, trace,
        key, gate)
  WHERE u.verdict < 2;
  IF v_readying THEN
    -- The lane was empty, so that nobody is suspected in it.
    INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
    SELECT v_lanes[u.lane], u.priority, u.stamp, u.type, u.seq - 1, v_depth[u.lane], false, v_queues[u.lane],
      v_partitions[u.lane]
    FROM unnest(v_lane, v_rn, verdicts, p_priority, stamps, p_delay_ms, p_type, seqs) u(lane, rn, verdict, priority,
        stamp, delay_ms, type, seq)
    WHERE u.rn = 1 AND u.verdict = 0 AND u.delay_ms = 0 AND v_depth[u.lane] = v_n[u.lane];
  END IF;
  IF v_readying AND v_delaying THEN
    INSERT INTO parked (lane, until, reason)
    SELECT v_lanes[u.lane], t + u.delay_ms * interval '1 ms', 'delay'
      FROM unnest(v_lane, v_rn, verdicts, p_delay_ms) u(lane, rn, verdict, delay_ms)
    WHERE u.rn = 1 AND u.verdict = 0 AND u.delay_ms > 0 AND v_depth[u.lane] = v_n[u.lane];
  END IF;
  IF v_executing THEN
    fence := nextval('fences');
    INSERT INTO leases (fence, worker, lanes, uptos, claimed_at)
    SELECT fence, p_worker, array_agg(v_lanes[u.lane]), array_agg(u.seq), t
      FROM unnest(v_lane, verdicts, seqs) u(lane, verdict, seq) WHERE u.verdict = 1;
  END IF;
  IF cardinality(p_keys) > 0 THEN
    UPDATE idempotency d
      SET answer = json_build_object('v', 'queue', 'place', u.place, 'wait_ms', u.wait_ms, 'reason', u.reason)
    FROM unnest(p_keys, verdicts, places, waits_ms, reasons) u(key, verdict, place, wait_ms, reason)
    WHERE (u.verdict = 0 OR u.verdict = 1 AND u.reason IN ('requested', 'still_running')) AND d.key = u.key;
  END IF;

  -- 12. How many are held now. The caller counted for the case that all are.
  IF v_all AND p_part >= 0 THEN
    INSERT INTO tallies AS x (worker, part, type, n) SELECT p_worker, p_part, u.type, u.n
      FROM unnest(p_types, p_type_counts) u(type, n)
      ON CONFLICT (worker, part, type) WHERE part >= 0 DO UPDATE SET n = x.n + excluded.n;
  ELSE
    FOR r IN SELECT u.type, count(*) AS n FROM unnest(p_type, verdicts) u(type, verdict) WHERE u.verdict < 2
      GROUP BY u.type LOOP
      PERFORM tally(p_worker, p_part, r.type, r.n);
    END LOOP;
  END IF;
END $$;
