-- Queues: create on first use, guard against concurrent subscription and deletion, size, wake-up.

-- Creating or ending a group, or deleting the queue, waits for pushes to the queue, and pushes wait for it: no push
-- can miss a group. False: one of the queues was deleted before it was guarded.
CREATE OR REPLACE FUNCTION mq_guard(p_queues int[], p_exclusive boolean) RETURNS boolean
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  v_queue int; v_there boolean := true;
BEGIN
  FOR v_queue IN SELECT DISTINCT q FROM unnest(p_queues) q ORDER BY q LOOP
    IF p_exclusive THEN PERFORM pg_advisory_xact_lock(hashtext('spillway.groups.' || current_schema()), v_queue);
    ELSE PERFORM pg_advisory_xact_lock_shared(hashtext('spillway.groups.' || current_schema()), v_queue); END IF;
    v_there := v_there AND EXISTS (SELECT FROM mq_queues q WHERE q.id = v_queue);
  END LOOP;
  RETURN v_there;
END $$;

CREATE OR REPLACE FUNCTION mq_queue(p_name text) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_id int;
BEGIN
  -- Another transaction may create it, or delete it, between the two.
  LOOP
    SELECT q.id INTO v_id FROM mq_queues q WHERE q.name = p_name;
    IF FOUND THEN RETURN v_id; END IF;
    INSERT INTO mq_queues (name, created_at) VALUES (p_name, clock()) ON CONFLICT (name) DO NOTHING RETURNING id
      INTO v_id;
    IF FOUND THEN RETURN v_id; END IF;
  END LOOP;
END $$;

-- How many messages behind a number were deleted one by one; p_done: those among them that do not count.
CREATE OR REPLACE FUNCTION mq_holes(p_holes bigint[], p_behind bigint, p_done bigint[]) RETURNS bigint
  LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN p_holes = '{}' THEN 0
    ELSE (SELECT count(*) FROM unnest(p_holes) h WHERE h > p_behind AND NOT h = ANY (p_done)) END
$$;

-- Messages that a queue holds: those that its slowest group has not read yet; all, if it has no group.
CREATE OR REPLACE FUNCTION mq_size(p_queue int) RETURNS bigint
  LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT coalesce(sum(p.tail - b.behind - mq_holes(p.holes, b.behind, '{}')), 0)::bigint
    FROM mq_partitions p CROSS JOIN LATERAL (
    SELECT greatest(p.low, mq_slowest(p_queue, p.id, p.low, p.tail)) AS behind
  ) b WHERE p.queue = p_queue
$$;

-- Wakes waiting pops of these queues, by hashes of their names: a notification has room for 8,000 bytes.
CREATE OR REPLACE FUNCTION mq_notify(p_queues text[]) RETURNS void
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT pg_notify('spillway_' || current_schema(), 'mq:' || CASE WHEN cardinality(p_queues) > 500 THEN '*'
      ELSE (SELECT string_agg(left(md5(n), 8), ',') FROM unnest(p_queues) n) END)
$$;
