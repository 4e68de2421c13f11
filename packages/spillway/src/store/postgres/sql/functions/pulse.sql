-- A process announces itself (enlist), then sends one heartbeat a second, which returns what it has to know about the
-- others. space_check fails if the disk is full.

CREATE OR REPLACE FUNCTION enlist(p_worker uuid, p_name text, p_lease_ms bigint, p_announced jsonb) RETURNS void
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  INSERT INTO workers (id, name, started_at, until, announced)
    VALUES (p_worker, p_name, clock(), clock() + p_lease_ms * interval '1 ms', p_announced)
$$;

-- One call a second per process: heartbeat, and all a process has to know of the others.
CREATE OR REPLACE FUNCTION pulse(
  p_worker uuid, p_lease_ms bigint, p_running json
)
RETURNS TABLE ( alive boolean, now_ms double precision, waiting boolean, next_due_ms bigint, oldest_ms bigint,
    held json, running json, gates json, halts json, cancels json, lost int )
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  UPDATE workers w SET until = t + p_lease_ms * interval '1 ms', running = p_running WHERE w.id = p_worker;
  alive := FOUND;
  now_ms := extract(epoch FROM t) * 1000;
  waiting := EXISTS (SELECT FROM ready x);
  -- No min(): greatest(0, NULL) is 0, which would say that something is due.
  next_due_ms := (SELECT greatest(0, date_part('epoch', p.until - t) * 1000)::bigint FROM parked p
      WHERE p.until < 'infinity' ORDER BY p.until LIMIT 1);
  oldest_ms := coalesce((SELECT (extract(epoch FROM t - o.accepted_at) * 1000)::bigint FROM ops o ORDER BY o.id
        LIMIT 1), 0);
  held := (SELECT json_object_agg(x.type, x.n) FROM (SELECT y.type, sum(y.n) AS n FROM tallies y GROUP BY y.type) x);
  running := (SELECT json_object_agg(x.type, x.n)
      FROM (SELECT e.key AS type, sum(e.value::int) AS n FROM workers w, json_each_text(w.running) e GROUP BY e.key) x);
  gates := (SELECT json_agg(json_build_object('name', g.name, 'held', g.held, 'full_at', g.full_at, 'overflowing',
          g.overflowing)) FROM gates g);
  halts := (SELECT json_agg(json_build_object('scope', h.scope, 'reason', h.reason)) FROM halts h);
  cancels := (SELECT json_agg(c.id) FROM cancels c);
  lost := (SELECT count(*) FROM workers w WHERE w.until < t);
  RETURN NEXT;
END $$;

-- Fails when the disk is full (53100). Updating a row does not: there is room in its page, and in the log. Growing a
-- file does, so 1 MB, which is more than the statement may keep in memory, goes to a file that is gone afterwards:
-- about 1 ms.
CREATE OR REPLACE FUNCTION space_check() RETURNS void
  LANGUAGE plpgsql SET work_mem = '64kB' SET temp_tablespaces = '' AS $$
DECLARE
  v_count bigint;
BEGIN
  WITH x AS MATERIALIZED (SELECT repeat('x', 8000) FROM generate_series(1, 128)) SELECT count(*) FROM x INTO v_count;
EXCEPTION WHEN configuration_limit_exceeded THEN
  -- temp_file_limit is below that: nothing can be said of the disk.
  NULL;
END $$;
