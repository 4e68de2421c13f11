-- Pauses of a queue, a lane or a type. A pause parks lanes as they become ready; resume puts them back.

-- While anything is paused, a transaction that may park a lane for it blocks resume until it has committed: a lane
-- parked just after its queue was resumed would be forgotten. Before any other lock.
--
-- A transaction that found no pause may see one later, and does not park for it, because resume would not wait for it:
-- its lanes become ready, and the process that claims them parks them. The setting remembers what was found.
CREATE OR REPLACE FUNCTION pause_guard() RETURNS boolean
  LANGUAGE plpgsql AS $$
BEGIN
  IF NOT EXISTS (SELECT FROM pauses) THEN RETURN false; END IF;
  PERFORM pg_advisory_xact_lock_shared(hashtext('spillway.pauses'), hashtext(current_schema()));
  PERFORM set_config('spillway.pause_guard', 'held', true);
  RETURN EXISTS (SELECT FROM pauses);
END $$;

-- Is this lane held back by an operator, and may this transaction park it for that?
CREATE OR REPLACE FUNCTION lane_paused(p_lane uuid) RETURNS boolean
  LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT current_setting('spillway.pause_guard', true) = 'held'
    AND EXISTS (SELECT FROM lanes l JOIN pauses p ON CASE WHEN p.queue = ''
      THEN p.partition = (SELECT x.type FROM ops x WHERE x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1)
      ELSE p.queue = l.queue AND (p.partition IS NULL OR p.partition = l.partition) END WHERE l.id = p_lane)
$$;

CREATE OR REPLACE FUNCTION pause(p_queue text, p_partition text) RETURNS void
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  INSERT INTO pauses (queue, partition, since) VALUES (p_queue, p_partition, clock()) ON CONFLICT DO NOTHING
$$;

-- Resuming a queue ends the pauses of its single lanes too. All its lanes go on at once, by priority as ever.
CREATE OR REPLACE FUNCTION resume(p_queue text, p_partition text) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_lane uuid; v_keys uuid[];
BEGIN
  PERFORM pg_advisory_xact_lock(hashtext('spillway.pauses'), hashtext(current_schema()));
  PERFORM set_config('spillway.pause_guard', 'held', true);
  DELETE FROM pauses p WHERE p.queue = p_queue AND (p_partition IS NULL OR p.partition = p_partition);
  v_keys := ARRAY(SELECT k.key FROM turns k WHERE k.key IN (
      SELECT x.key FROM parked x WHERE x.reason = 'pause' AND x.key IS NOT NULL) ORDER BY k.key FOR UPDATE);
  FOR v_lane IN
    WITH held AS (
      SELECT x.lane FROM parked x JOIN lanes l ON l.id = x.lane
      WHERE x.reason = 'pause'
        AND (p_queue = '' OR l.queue = p_queue AND (p_partition IS NULL OR l.partition = p_partition))
        ORDER BY x.lane FOR UPDATE OF x
    )
    DELETE FROM parked x USING held h WHERE x.lane = h.lane RETURNING x.lane
  LOOP
    -- Back here if another pause still holds it.
    PERFORM lane_requeue(v_lane);
  END LOOP;
  IF cardinality(v_keys) > 0 THEN PERFORM turns_next(v_keys); END IF;
END $$;

-- A step of accept. Which lanes' first items may run now: not those that are paused. Per item the number of its lane,
-- its number in the lane (1: the first) and its type.
CREATE OR REPLACE FUNCTION pauses_check(
  p_queues text[], p_partitions text[], p_may_run boolean[], p_lane int[], p_rn bigint[], p_types text[]
) RETURNS boolean[]
  LANGUAGE sql STABLE AS $$
  SELECT array_agg(u.may_run AND NOT EXISTS (SELECT FROM pauses s WHERE CASE WHEN s.queue = '' THEN s.partition = f.type
      ELSE s.queue = u.queue AND (s.partition IS NULL OR s.partition = u.partition) END) ORDER BY u.i)
  FROM unnest(p_queues, p_partitions, p_may_run) WITH ORDINALITY u(queue, partition, may_run, i)
  JOIN unnest(p_lane, p_rn, p_types) f(lane, rn, type) ON f.lane = u.i AND f.rn = 1
$$;
