-- A page of the lanes that hold operations, for operators.
--
-- In the order of the lanes' ids, which never change. It walks the queue's primary key from lane to lane, one probe
-- each, so it reads neither empty lanes, of which there may be millions, nor the operations behind a lane's first. A
-- walk over the lanes themselves would read the empty ones too, and an index by queue is one more write for each new
-- lane.

-- p_queue, p_patterns: only lanes of this queue, and of these (`orders*`: a prefix); NULL: all, without those of
-- parallel operations. Each of these has a lane of its own, whose id is the operation's and whose queue is its type:
-- among a million of them the others could not be seen, and one scan passes them (300,000: 0.35 s on two busy cores).
-- It examines p_examined lanes at most. `last` is the last of them if they were all used up, so that there may be more
-- behind it; else NULL. One row without an id if no lane fits.
CREATE OR REPLACE FUNCTION lanes_page(
  p_queue text, p_patterns text[], p_after uuid, p_limit int, p_examined int
)
RETURNS TABLE (
  id uuid, queue text, partition text, depth bigint, paused_by text, ready boolean, label text, parked_for text,
  due_at timestamptz, due_ms bigint, age_ms bigint, head uuid, type text, started boolean, attempts int,
  max_attempts int, last uuid
)
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_hashjoin = off SET enable_mergejoin = off
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_lane uuid := coalesce(p_after, '00000000-0000-0000-0000-000000000000');
  v_found uuid[] := '{}'; v_last uuid;
  w record;
BEGIN
  FOR w IN
    WITH RECURSIVE walk(lane, n) AS (
      (SELECT o.lane, 1 FROM ops o WHERE o.lane > v_lane AND (o.lane <> o.id OR o.type = p_queue)
        ORDER BY o.lane LIMIT 1)
      UNION ALL
      SELECT x.lane, p.n + 1 FROM walk p
        CROSS JOIN LATERAL (
          SELECT o.lane FROM ops o WHERE o.lane > p.lane AND (o.lane <> o.id OR o.type = p_queue)
          ORDER BY o.lane LIMIT 1
        ) x
        WHERE p.n < p_examined
    )
    SELECT k.lane, k.n, (p_queue IS NULL OR l.queue = p_queue) AND queue_matches(l.queue, p_patterns) AS fits
    FROM walk k JOIN lanes l ON l.id = k.lane
  LOOP
    IF w.fits THEN v_found := v_found || w.lane; END IF;
    IF w.n = p_examined THEN v_last := w.lane; END IF;
    EXIT WHEN cardinality(v_found) = p_limit;
  END LOOP;
  RETURN QUERY
  SELECT l.id, l.queue, l.partition, l.depth,
    (SELECT CASE WHEN s.queue = '' THEN 'type' WHEN s.partition IS NULL THEN 'queue' ELSE 'partition' END FROM pauses s
      WHERE CASE WHEN s.queue = '' THEN s.partition = o.type
        ELSE s.queue = l.queue AND (s.partition IS NULL OR s.partition = l.partition) END
      ORDER BY s.queue = '', s.partition NULLS FIRST LIMIT 1),
    r.lane IS NOT NULL, CASE WHEN r.type <> o.type THEN r.type END, p.reason, nullif(p.until, 'infinity'),
    (extract(epoch FROM nullif(p.until, 'infinity') - t) * 1000)::bigint,
    greatest(0, extract(epoch FROM t - o.accepted_at) * 1000)::bigint, o.id, o.type, o.started_at IS NOT NULL,
    o.attempts, o.max_attempts, v_last
  FROM unnest(v_found) WITH ORDINALITY u(lane, i)
  JOIN lanes l ON l.id = u.lane
  CROSS JOIN LATERAL (SELECT x.* FROM ops x WHERE x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1) o
  LEFT JOIN parked p ON p.lane = l.id
  LEFT JOIN ready r ON r.priority = o.priority AND r.stamp = o.stamp AND r.lane = l.id
  ORDER BY u.i;
  IF NOT FOUND THEN
    last := v_last;
    RETURN NEXT;
  END IF;
END $$;

-- Is the queue one of these names, where `orders*` means a prefix? NULL: all are. The same as mayUseQueue of
-- http/queue-names.ts.
CREATE OR REPLACE FUNCTION queue_matches(p_queue text, p_patterns text[]) RETURNS boolean
  LANGUAGE sql IMMUTABLE AS $$
  SELECT p_patterns IS NULL OR EXISTS (SELECT FROM unnest(p_patterns) x(pattern)
    WHERE CASE WHEN right(x.pattern, 1) = '*' THEN starts_with(p_queue, left(x.pattern, -1))
      ELSE p_queue = x.pattern END)
$$;
