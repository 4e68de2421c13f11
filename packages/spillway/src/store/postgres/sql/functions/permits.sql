-- Permits of a pool, counted per process: a process that dies gives back what it held.

-- Gives permits back, then takes permits. For each that it takes: 'granted', 'identity_full' or 'pool_full'. One row
-- lock per pool makes it exact; permits of processes that are gone do not count.
-- p_seq grows with each call. A call whose answer was lost may have run, or may still run: the next call lists in
-- p_held all that the process holds, and the late call finds that it is late (NULL).
CREATE OR REPLACE FUNCTION permits_change(
  p_worker uuid, p_pool text, p_seq bigint, p_held text[], p_counts int[], p_gives text[], p_takes text[],
  p_each int[], p_all int[]
) RETURNS text[]
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_out text[] := '{}'; v_total bigint; v_mine bigint; r record;
BEGIN
  INSERT INTO connection_pools (pool) VALUES (p_pool) ON CONFLICT DO NOTHING;
  PERFORM FROM connection_pools x WHERE x.pool = p_pool FOR UPDATE;
  PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
  IF NOT FOUND THEN RAISE EXCEPTION 'process % is not enlisted', p_worker USING ERRCODE = '55000'; END IF;
  INSERT INTO connection_writers AS x (pool, worker, seq) VALUES (p_pool, p_worker, p_seq)
    ON CONFLICT (pool, worker) DO UPDATE SET seq = excluded.seq WHERE x.seq < excluded.seq;
  IF NOT FOUND THEN RETURN NULL; END IF;
  IF p_held IS NOT NULL THEN
    DELETE FROM connections c WHERE c.pool = p_pool AND c.worker = p_worker AND NOT c.identity = ANY (p_held);
    INSERT INTO connections AS c (pool, identity, worker, held) SELECT p_pool, u.who, p_worker, u.n
      FROM unnest(p_held, p_counts) u(who, n)
      ON CONFLICT (pool, identity, worker) DO UPDATE SET held = excluded.held;
  END IF;
  FOR r IN SELECT u.who, count(*)::int AS n FROM unnest(p_gives) u(who) GROUP BY u.who LOOP
    DELETE FROM connections c WHERE c.pool = p_pool AND c.identity = r.who AND c.worker = p_worker AND c.held <= r.n;
    CONTINUE WHEN FOUND;
    UPDATE connections c SET held = c.held - r.n WHERE c.pool = p_pool AND c.identity = r.who AND c.worker = p_worker;
  END LOOP;
  IF cardinality(p_takes) = 0 THEN RETURN v_out; END IF;
  SELECT coalesce(sum(c.held), 0) INTO v_total FROM connections c JOIN workers w ON w.id = c.worker
    WHERE c.pool = p_pool;
  FOR r IN SELECT u.who, u.each_max, u.all_max
    FROM unnest(p_takes, p_each, p_all) WITH ORDINALITY u(who, each_max, all_max, i) ORDER BY u.i LOOP
    SELECT coalesce(sum(c.held), 0) INTO v_mine FROM connections c JOIN workers w ON w.id = c.worker
      WHERE c.pool = p_pool AND c.identity = r.who;
    IF v_mine >= r.each_max THEN
      v_out := v_out || 'identity_full'::text;
    ELSIF v_total >= r.all_max THEN
      v_out := v_out || 'pool_full'::text;
    ELSE
      INSERT INTO connections AS c (pool, identity, worker, held) VALUES (p_pool, r.who, p_worker, 1)
        ON CONFLICT (pool, identity, worker) DO UPDATE SET held = c.held + 1;
      v_total := v_total + 1;
      v_out := v_out || 'granted'::text;
    END IF;
  END LOOP;
  RETURN v_out;
END $$;

-- The name and the numbers that the release before (0.2.0) uses; to be removed after the next release.
CREATE OR REPLACE FUNCTION connections_change(
  p_worker uuid, p_pool text, p_seq bigint, p_held text[], p_counts int[], p_gives text[], p_takes text[],
  p_each int[], p_all int[]
) RETURNS smallint[]
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT CASE WHEN o.outcomes IS NOT NULL THEN ARRAY(
      SELECT (array_position(ARRAY['granted', 'identity_full', 'pool_full'], u.outcome) - 1)::smallint
      FROM unnest(o.outcomes) WITH ORDINALITY u(outcome, i) ORDER BY u.i) END
    FROM permits_change(p_worker, p_pool, p_seq, p_held, p_counts, p_gives, p_takes, p_each, p_all) o(outcomes)
$$;
