-- Checks everything that must hold between transactions. Returns no row if all of it does.

-- Everything that must hold between transactions; no row when it does.
CREATE OR REPLACE FUNCTION audit() RETURNS TABLE (fault text)
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  WITH places AS (
    SELECT lane FROM ready UNION ALL SELECT lane FROM parked UNION ALL SELECT unnest(lanes) FROM leases
  ), counted AS (
    SELECT l.id, l.head, l.tail, l.depth, coalesce(p.n, 0) AS places, coalesce(o.n, 0) AS ops, o.first, o.last
    FROM lanes l
    LEFT JOIN (SELECT lane, count(*) AS n FROM places GROUP BY lane) p ON p.lane = l.id
    LEFT JOIN (SELECT lane, count(*) AS n, min(seq) AS first, max(seq) AS last FROM ops
        GROUP BY lane) o ON o.lane = l.id
  )
  SELECT format('lane %s has %s operations but says %s', id, ops, depth) FROM counted WHERE ops <> depth
  UNION ALL SELECT format('lane %s with %s operations is in %s places', id, ops, places) FROM counted
    WHERE (ops > 0) <> (places = 1) AND NOT (ops = 0 AND places = 0)
  UNION ALL SELECT format('lane %s has sequences %s..%s outside %s..%s', id, first, last, head, tail) FROM counted
    WHERE first <= head OR last > tail
  UNION ALL SELECT format('lane %s of a parallel operation is empty, or has another one', l.id) FROM lanes l
    WHERE l.alone AND NOT EXISTS (SELECT FROM ops o WHERE o.lane = l.id AND o.id = l.id)
  UNION ALL SELECT format('operation %s has no lane', o.id) FROM ops o
    WHERE NOT EXISTS (SELECT FROM lanes l WHERE l.id = o.lane)
  UNION ALL SELECT format('lane %s waits without being known', p.lane) FROM places p
    WHERE NOT EXISTS (SELECT FROM lanes l WHERE l.id = p.lane)
  UNION ALL SELECT format('lane %s is ready with a stamp that is not its head''s', r.lane) FROM ready r
    WHERE NOT EXISTS (
    SELECT FROM lanes l,
      LATERAL (SELECT x.priority, x.stamp FROM ops x WHERE x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1) o
    WHERE l.id = r.lane AND o.priority = r.priority AND o.stamp = r.stamp)
  UNION ALL SELECT format('lane %s is ready with another name, or a head or caution that would pass an operation by',
      r.lane) FROM ready r JOIN lanes l ON l.id = r.lane
    WHERE r.queue <> l.queue OR r.partition <> l.partition OR EXISTS (SELECT FROM ops o
        WHERE o.lane = l.id AND (o.seq <= r.head OR o.seq <= l.careful AND NOT r.careful))
  UNION ALL SELECT format('lane %s is ready under %s, which is not its head''s type, or nobody''s label', r.lane,
      r.type) FROM ready r
    WHERE (strpos(r.type, ' ') > 0 AND NOT EXISTS (SELECT FROM workers w WHERE w.announced ? r.type))
      OR split_part(r.type, ' ', 1) IS DISTINCT FROM (SELECT o.type FROM lanes l, ops o
          WHERE l.id = r.lane AND o.lane = l.id AND o.seq > l.head ORDER BY o.seq LIMIT 1)
  UNION ALL SELECT format('lease %s belongs to nobody', l.fence) FROM leases l
    WHERE NOT EXISTS (SELECT FROM workers w WHERE w.id = l.worker)
  UNION ALL SELECT format('type %s: %s operations, %s tallied', coalesce(o.type, t.type), coalesce(o.n, 0),
      coalesce(t.n, 0))
    FROM (SELECT type, count(*) AS n FROM ops GROUP BY type) o
    FULL JOIN (SELECT type, sum(n) AS n FROM tallies WHERE type <> '!dead' GROUP BY type) t USING (type)
    WHERE coalesce(o.n, 0) <> coalesce(t.n, 0)
  UNION ALL SELECT format('%s dead letters, %s tallied', d.n, t.n)
    FROM (SELECT count(*) AS n FROM dead_letters) d, (SELECT coalesce(sum(n), 0) AS n FROM tallies
        WHERE type = '!dead') t WHERE d.n <> t.n
  UNION ALL SELECT x.fault FROM turns_audit() x
$$;
