-- accept_flush: one call per flush. Decides idempotency, halt, capacity and rate per item, and writes what is accepted,
-- in one transaction. The steps are in the files of what they decide, and run in the lock order
-- (tables/0001-core.sql).
--
-- Items come grouped by lane, and each lane once, sorted by id. Verdicts: queue, execute, apply; replay (the stored
-- answer is returned), mismatch (key used for another body), in_progress (the first request of the key is not answered
-- yet); capacity_full, rate_limited, halted, and depth_full (nothing more may wait). Between the steps NULL is an item
-- that is not decided yet, and a NULL list means that no item is.
--
-- Reasons given with the items: '' may run now and answers with its result; '+requested' and '+still_running' may run
-- now and answer with a ticket; all others are queued.
--
-- If nothing is scarce, every step is one set-based statement. Only a flush that does not fit is rationed item by item.
-- Items of an empty lane that may be applied now move head with tail and leave no operation; the caller writes their
-- effect in the same transaction.
--
-- The steps have no settings of their own: they run with those of accept. Setting them for each step costs more than
-- calling it. Counting the items per lane here, instead of in the caller, made a flush of 64 cost 8% more (per rate
-- key: 3%), so p_counts, p_may_run, p_rn and p_rate_asked are passed for the case that nothing is refused. A step is
-- called as an expression (r := step(…)), not in a FROM clause, which costs 10 µs more.
CREATE OR REPLACE FUNCTION accept_flush(
  p_worker uuid, p_part smallint, p_apply boolean,
  -- Each lane once, by id, and what each item brings; p_lane is the number of its lane, p_rn its number in the lane.
  p_lanes uuid[], p_queues text[], p_partitions text[], p_counts bigint[], p_may_run boolean[],
  p_lane int[], p_rn bigint[], p_id uuid[], p_type text[], p_priority smallint[], p_stamp bigint[], p_lead bigint[],
  p_identity text[], p_payload text[], p_delay_ms bigint[], p_max_attempts int[], p_timeout_ms int[], p_trace text[],
  p_reason text[], p_pace_ms real[], p_backlog_ms bigint,
  -- Empty lists: no item has one.
  p_keys uuid[], p_requests uuid[], p_key_ttl_ms bigint, p_gates text[], p_halts text[],
  -- Each rate key once, in order (p_rate_minutes: its window, rates.sql); per tier the number of its key, and of its
  -- item. No items: one tier each.
  p_rate_key uuid[], p_rate_asked int[], p_rate_limit int[], p_rate_minutes int[], p_rate_keep int[],
  p_rate_ix int[], p_rate_item int[],
  -- Nothing more may wait; which items are one request.
  p_full boolean, p_batch int[],
  -- Per lane: is it a parallel operation's, what key has it, and how many of that may run. How many wait for slots.
  p_alone boolean[], p_turn_keys uuid[], p_turn_most int[], p_ahead bigint, p_expires_ms bigint[],
  -- One row of arrays, an element per item: parsing rows costs the caller more than the rest together.
  OUT verdicts text[], OUT fence bigint, OUT seqs bigint[], OUT places bigint[], OUT waits_ms bigint[],
  OUT reasons text[], OUT stamps bigint[], OUT answers json[], OUT ops uuid[],
  OUT tiers int[], OUT rates_left bigint[], OUT rates_reset_ms bigint[], OUT at_ms bigint
)
  LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET jit = off AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock(); v_decided text[];
  v_lanes uuid[] := p_lanes; v_queues text[] := p_queues; v_partitions text[] := p_partitions;
  v_counts bigint[] := p_counts; v_may_run boolean[] := p_may_run; v_lane int[] := p_lane; v_rn bigint[] := p_rn;
  v_alone boolean[] := p_alone; v_turn_keys uuid[] := p_turn_keys; v_turn_most int[] := p_turn_most;
  v_may_lease boolean := false; v_paused boolean; v_parked boolean[]; v_behind bigint[];
  k record; n record; l record; d record; w record;
BEGIN
  -- Its row stays until we commit, so that a process that may hold leases keeps that right.
  IF NOT p_apply AND p_reason && '{"",+requested,+still_running}' THEN
    PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
    v_may_lease := FOUND;
  END IF;
  IF p_full OR cardinality(p_keys) + cardinality(p_halts) + cardinality(p_gates) + cardinality(p_rate_key) > 0 THEN
    k := accept_decide(p_lanes, p_queues, p_partitions, p_lane, p_id, p_type, p_reason, p_keys, p_requests,
      p_key_ttl_ms, p_gates, p_halts, p_rate_key, p_rate_asked, p_rate_limit, p_rate_minutes, p_rate_keep, p_rate_ix,
      p_rate_item, p_full, p_batch, t);
    v_decided := k.verdicts; answers := k.answers; ops := k.ops;
    tiers := k.tiers; rates_left := k.rates_left; rates_reset_ms := k.rates_reset_ms; at_ms := k.at_ms;
  END IF;
  IF v_decided IS NOT NULL THEN
    n := lanes_count(p_lanes, p_queues, p_partitions, p_lane, p_reason, v_decided);
    v_lanes := n.ids; v_queues := n.queues; v_partitions := n.partitions; v_counts := n.counts; v_may_run := n.may_run;
    v_lane := n.lane; v_rn := n.rn; w := lanes_pick(p_lanes, v_lanes, p_alone, p_turn_keys, p_turn_most);
    v_alone := w.alone; v_turn_keys := w.keys; v_turn_most := w.most;
  END IF;
  v_paused := EXISTS (SELECT FROM pauses);
  IF NOT v_may_lease AND NOT p_apply THEN v_may_run := array_fill(false, ARRAY[coalesce(cardinality(v_lanes), 0)]);
  ELSIF v_paused THEN v_may_run := pauses_check(v_queues, v_partitions, v_may_run, v_lane, v_rn, p_type);
  END IF;
  IF cardinality(v_alone) > 0 THEN
    l := lanes_take(v_lanes, v_queues, v_partitions, v_counts, v_may_run, v_alone, v_turn_keys, p_apply, t);
  ELSE l := lanes_append(v_lanes, v_queues, v_partitions, v_counts, v_may_run, p_apply, t);
  END IF;
  IF cardinality(v_turn_keys) > 0 THEN
    w := turns_take(v_lanes, v_queues, v_partitions, v_turn_keys, v_turn_most, v_lane, p_delay_ms, l.running, t);
    v_parked := w.waits; v_behind := w.ahead; l.running := w.running;
  END IF;
  d := verdicts_decide(p_apply, v_may_lease, v_paused, p_backlog_ms, v_lane, v_rn, p_priority, p_stamp, p_lead,
    p_delay_ms, p_reason, p_pace_ms, v_decided, v_counts, l.tails, l.depths, l.running, l.paces, l.blocked);
  verdicts := d.verdicts; seqs := d.seqs; waits_ms := d.waits_ms; reasons := d.reasons; stamps := d.stamps;
  places := d.places;
  IF true = ANY (v_alone) AND (p_ahead > 0 OR v_parked IS NOT NULL) THEN
    w := places_alone(v_lane, v_alone, p_ahead, v_parked, v_behind, v_turn_most, p_pace_ms, p_delay_ms, places,
      waits_ms, reasons);
    places := w.places; waits_ms := w.waits_ms; reasons := w.reasons;
  END IF;

  INSERT INTO ops (lane, seq, id, type, priority, stamp, identity, payload, accepted_at, not_before, started_at,
      max_attempts, timeout_ms, trace, idem, gate, expires_at)
    SELECT v_lanes[u.lane], u.seq, u.id, u.type, u.priority, u.stamp, u.identity, u.payload::json, t,
      CASE WHEN u.delay_ms > 0 THEN t + u.delay_ms * interval '1 ms' END, CASE WHEN u.verdict = 'execute' THEN t END,
      u.max_attempts, u.timeout_ms, u.trace, u.key, u.gate, t + u.expires_ms * interval '1 ms'
    FROM unnest(v_lane, verdicts, seqs, stamps, p_id, p_type, p_priority, p_identity, p_payload, p_delay_ms,
        p_max_attempts, p_timeout_ms, p_trace, p_keys, p_gates, p_expires_ms)
      u(lane, verdict, seq, stamp, id, type, priority, identity, payload, delay_ms, max_attempts, timeout_ms, trace,
        key, gate, expires_ms) WHERE u.verdict IN ('queue', 'execute');
  IF d.starts_lanes THEN
    PERFORM lanes_start(v_lanes, v_queues, v_partitions, v_counts, l.depths, v_lane, v_rn, verdicts, p_priority, stamps,
      p_delay_ms, p_type, seqs, v_parked, t);
  END IF;
  IF true = ANY (v_parked) THEN PERFORM turns_next(v_turn_keys); END IF; -- if the limit of a key was raised
  IF 'execute' = ANY (verdicts) THEN fence := lease_take(p_worker, v_lanes, v_lane, verdicts, seqs, t); END IF;
  IF cardinality(p_keys) > 0 THEN PERFORM idempotency_answer(p_keys, verdicts, places, waits_ms, reasons); END IF;
  PERFORM tally_accepted(p_worker, p_part, p_type, verdicts, d.accepted);
END $$;

-- A step of accept_flush: idempotency, halts, depth and the gates that count, in the lock order. verdicts: NULL is not
-- decided yet, and a NULL list means that no item is.
CREATE OR REPLACE FUNCTION accept_decide(
  p_lanes uuid[], p_queues text[], p_partitions text[], p_lane int[], p_id uuid[], p_type text[], p_reason text[],
  p_keys uuid[], p_requests uuid[], p_key_ttl_ms bigint, p_gates text[], p_halts text[],
  p_rate_key uuid[], p_rate_asked int[], p_rate_limit int[], p_rate_minutes int[], p_rate_keep int[],
  p_rate_ix int[], p_rate_item int[], p_full boolean, p_batch int[], p_at timestamptz,
  OUT verdicts text[], OUT answers json[], OUT ops uuid[],
  OUT tiers int[], OUT rates_left bigint[], OUT rates_reset_ms bigint[], OUT at_ms bigint
)
  LANGUAGE plpgsql AS $$
DECLARE
  k record; g record;
BEGIN
  IF cardinality(p_keys) > 0 THEN
    k := idempotency_take(p_keys, p_requests, p_id, p_batch, p_at, p_key_ttl_ms);
    verdicts := k.verdicts; answers := k.answers; ops := k.ops;
  END IF;
  IF cardinality(p_halts) > 0 THEN verdicts := halts_check(p_halts, verdicts); END IF;
  IF p_full THEN
    verdicts := depth_check(p_batch, p_lane, p_reason, verdicts, p_lanes, p_queues, p_partitions, p_type[1]);
  END IF;
  IF cardinality(p_gates) > 0 OR cardinality(p_rate_key) > 0 THEN
    g := gates_take(p_gates, p_rate_key, p_rate_asked, p_rate_limit, p_rate_minutes, p_rate_keep, p_rate_ix,
      p_rate_item, verdicts, cardinality(p_id), p_at);
    verdicts := g.verdicts;
    tiers := g.tiers; rates_left := g.rates_left; rates_reset_ms := g.rates_reset_ms; at_ms := g.at_ms;
  END IF;
  IF verdicts IS NOT NULL AND cardinality(p_keys) > 0 THEN PERFORM idempotency_release(p_keys, verdicts); END IF;
END $$;

-- The same for release 0.2.0, which knows no parallel operations, keys and expiry.
CREATE OR REPLACE FUNCTION accept(
  p_worker uuid, p_part smallint, p_apply boolean,
  p_lanes uuid[], p_queues text[], p_partitions text[], p_counts bigint[], p_may_run boolean[],
  p_lane int[], p_rn bigint[], p_id uuid[], p_type text[], p_priority smallint[], p_stamp bigint[], p_lead bigint[],
  p_identity text[], p_payload text[], p_delay_ms bigint[], p_max_attempts int[], p_timeout_ms int[], p_trace text[],
  p_reason text[], p_pace_ms real[], p_backlog_ms bigint,
  p_keys uuid[], p_requests uuid[], p_key_ttl_ms bigint, p_gates text[], p_halts text[],
  p_rate_key uuid[], p_rate_asked int[], p_rate_limit int[], p_rate_minutes int[], p_rate_keep int[],
  p_rate_ix int[], p_rate_item int[], p_full boolean, p_batch int[],
  OUT verdicts text[], OUT fence bigint, OUT seqs bigint[], OUT places bigint[], OUT waits_ms bigint[],
  OUT reasons text[], OUT stamps bigint[], OUT answers json[], OUT ops uuid[],
  OUT tiers int[], OUT rates_left bigint[], OUT rates_reset_ms bigint[], OUT at_ms bigint
)
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT * FROM accept_flush(p_worker, p_part, p_apply, p_lanes, p_queues, p_partitions, p_counts, p_may_run, p_lane,
    p_rn, p_id, p_type, p_priority, p_stamp, p_lead, p_identity, p_payload, p_delay_ms, p_max_attempts, p_timeout_ms,
    p_trace, p_reason, p_pace_ms, p_backlog_ms, p_keys, p_requests, p_key_ttl_ms, p_gates, p_halts, p_rate_key,
    p_rate_asked, p_rate_limit, p_rate_minutes, p_rate_keep, p_rate_ix, p_rate_item, p_full, p_batch, '{}', '{}',
    '{}', 0, '{}')
$$;
