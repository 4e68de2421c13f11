-- What becomes of each item of a flush, now that its lane is locked and has given out sequences.
--
-- A lane that holds nothing but what this flush brings starts with the item of rn 1. What runs is in nobody's way:
-- place 0 is the next to run. An item's stamp begins where its priority level is: at the smallest stamp that waits
-- there.
--
-- No ORDER BY: a function scan returns its rows in order, and sorting each array would cost more than making it.
CREATE OR REPLACE FUNCTION verdicts_decide(
  p_apply boolean, p_may_lease boolean, p_paused boolean, p_backlog_ms bigint,
  p_lane int[], p_rn bigint[], p_priority smallint[], p_stamp bigint[], p_lead bigint[], p_delay_ms bigint[],
  p_reason text[], p_pace_ms real[], p_decided text[],
  p_counts bigint[], p_tails bigint[], p_depths bigint[], p_running int[], p_paces real[], p_blocked bigint[],
  OUT verdicts text[], OUT seqs bigint[], OUT places bigint[], OUT waits_ms bigint[], OUT stamps bigint[],
  OUT reasons text[],
  OUT starts_lanes boolean,                  -- a lane that was empty begins with a queued item
  OUT accepted bigint                        -- how many are to be written as operations
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_level bigint[] := '{NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL}';
  v_priority int;
BEGIN
  -- Mostly all have one priority.
  FOREACH v_priority IN ARRAY CASE WHEN p_priority[1] = ALL (p_priority) THEN p_priority[1:1]
      ELSE ARRAY(SELECT DISTINCT u.priority FROM unnest(p_priority) u(priority)) END LOOP
    v_level[v_priority] := coalesce(
      (SELECT r.stamp FROM ready r WHERE r.priority = v_priority ORDER BY r.stamp LIMIT 1),
      (SELECT s.last_value FROM stamps s));
  END LOOP;
  SELECT array_agg(x.verdict), array_agg(x.seq),
      array_agg(greatest(0, x.before + x.rn - 1 - x.running)),
      array_agg((greatest(x.delay_ms, x.blocked_ms) + greatest(x.pace * (x.before + x.rn), p_backlog_ms))::bigint),
      array_agg(x.stamp),
      -- Order before load: the reason of an item behind another one is the order, unless it asked to be queued.
      array_agg(CASE WHEN x.reason IN ('requested', '+requested') THEN 'requested'
        WHEN x.reason = '+still_running' AND x.verdict = 'execute' THEN 'still_running'
        WHEN x.before > 0 OR x.rn > 1 THEN 'maintaining_order'
        WHEN x.reason NOT IN ('', '+still_running') THEN x.reason
        WHEN p_paused THEN 'maintaining_order' ELSE 'system_busy' END),
      bool_or(x.verdict = 'queue' AND x.rn = 1 AND x.before = 0),
      count(*) FILTER (WHERE x.verdict IN ('queue', 'execute'))
    INTO verdicts, seqs, places, waits_ms, stamps, reasons, starts_lanes, accepted
  FROM (
    SELECT u.rn, u.reason, u.delay_ms, p_blocked[u.lane] AS blocked_ms, p_running[u.lane] AS running,
      CASE WHEN p_apply AND p_depths[u.lane] = 0 THEN 0 ELSE p_depths[u.lane] - p_counts[u.lane] END AS before,
      p_tails[u.lane] - p_counts[u.lane] + u.rn AS seq,
      CASE WHEN p_paces[u.lane] < 0 THEN u.pace_ms ELSE p_paces[u.lane] END AS pace,
      greatest(u.stamp, v_level[u.priority] + u.lead) AS stamp,
      coalesce(u.decided, CASE WHEN p_apply AND p_depths[u.lane] = 0 THEN 'apply'
        WHEN u.rn = 1 AND p_may_lease AND p_running[u.lane] = 1 AND p_depths[u.lane] = p_counts[u.lane] THEN 'execute'
        ELSE 'queue' END) AS verdict
    FROM unnest(p_lane, p_rn, p_priority, p_stamp, p_lead, p_delay_ms, p_reason, p_pace_ms, p_decided)
      u(lane, rn, priority, stamp, lead, delay_ms, reason, pace_ms, decided)
  ) x;
END $$;

-- Nothing is before a parallel operation in its lane. Its place is among all that wait for the same slots (p_ahead);
-- or, if it waits for its turn (p_parked), behind those of its key (p_behind), of which p_most run at a time.
CREATE OR REPLACE FUNCTION places_alone(
  p_lane int[], p_alone boolean[], p_ahead bigint, p_parked boolean[], p_behind bigint[], p_most int[],
  p_pace_ms real[], p_delay_ms bigint[], p_places bigint[], p_waits_ms bigint[], p_reasons text[],
  OUT places bigint[], OUT waits_ms bigint[], OUT reasons text[]
)
  LANGUAGE sql IMMUTABLE AS $$
  SELECT array_agg(CASE WHEN x.waits THEN x.behind WHEN p_alone[x.lane] AND p_ahead > 0 THEN p_ahead + x.lane - 1
      ELSE x.place END),
    array_agg(CASE WHEN x.waits THEN greatest(x.wait_ms, (x.pace * (x.behind + 1) / p_most[x.lane])::bigint)
      ELSE x.wait_ms END),
    array_agg(CASE WHEN x.waits AND x.delay = 0 AND x.reason = 'system_busy' THEN 'maintaining_order'
      ELSE x.reason END)
  FROM (
    SELECT u.*, coalesce(p_parked[u.lane], false) AS waits, greatest(0, p_behind[u.lane]) AS behind
    FROM unnest(p_lane, p_places, p_waits_ms, p_reasons, p_pace_ms, p_delay_ms)
      u(lane, place, wait_ms, reason, pace, delay)
  ) x
$$;
