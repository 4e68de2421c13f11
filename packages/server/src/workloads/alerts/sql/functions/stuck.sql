-- Finds operations that run much longer than their timeout.

-- The longest-running operation of each type that has been running for more than p_times its timeout. Looks up leased
-- operations by index, however many wait: marking one cuts its lease down to it, so that a lane has few rows to
-- examine.
CREATE OR REPLACE FUNCTION stuck_operations(
  p_times int
) RETURNS TABLE (type text, id uuid, queue text, partition text, seconds double precision)
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_hashjoin = off SET enable_mergejoin = off
  SET enable_seqscan = off SET enable_bitmapscan = off AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  RETURN QUERY
    SELECT DISTINCT ON (o.type) o.type, o.id, n.queue, n.partition,
      extract(epoch FROM t - o.started_at)::double precision
    FROM leases l, unnest(l.lanes, l.uptos) z(lane, upto), ops o, lanes n
    WHERE o.lane = z.lane AND o.seq <= z.upto AND n.id = z.lane
      AND o.started_at < t - p_times * o.timeout_ms::bigint * interval '1 ms'
    ORDER BY o.type, o.started_at;
END $$;
