-- Capacity gates: how many are held, and the hysteresis between full_at and resume_below.
--
-- capacity_take and capacity_hold are called by gates_take and run with the settings of accept.

-- Locks the gates of a flush, in name order. left_now: how many more each may hold; asked: how many want one.
CREATE OR REPLACE FUNCTION capacity_take(
  p_gates text[], p_decided text[],
  OUT names text[], OUT left_now bigint[], OUT asked bigint[], OUT is_tight boolean
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  SELECT array_agg(g.name ORDER BY g.name),
      array_agg(CASE WHEN g.overflowing THEN 0 ELSE g.full_at - g.held END ORDER BY g.name),
      array_agg(g.asked ORDER BY g.name), bool_or(g.overflowing OR g.held + g.asked > g.full_at)
    INTO names, left_now, asked, is_tight
    FROM (
      SELECT x.name, x.held, x.full_at, x.overflowing, (
          SELECT count(*) FROM unnest(p_gates, p_decided) u(name, decided) WHERE u.name = x.name AND u.decided IS NULL
        ) AS asked
      FROM gates x WHERE x.name = ANY (p_gates) ORDER BY x.name FOR UPDATE
    ) g;
  IF coalesce(cardinality(names), 0)
      <> (SELECT count(DISTINCT u.name) FROM unnest(p_gates) u(name) WHERE u.name IS NOT NULL) THEN
    RAISE EXCEPTION 'a capacity gate is not registered' USING ERRCODE = 'XX000';
  END IF;
END $$;

-- Writes what the gates gave.
CREATE OR REPLACE FUNCTION capacity_hold(p_names text[], p_gave bigint[], p_at timestamptz) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE gates x SET held = x.held + u.gave, overflowing = x.overflowing OR x.held + u.gave >= x.full_at,
      changed_at = CASE WHEN NOT x.overflowing AND x.held + u.gave >= x.full_at THEN p_at ELSE x.changed_at END
    FROM unnest(p_names, p_gave) u(name, gave) WHERE x.name = u.name AND u.gave > 0;
END $$;

CREATE OR REPLACE FUNCTION gate_register(p_name text, p_full_at bigint, p_resume_below bigint) RETURNS void
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  INSERT INTO gates AS g (name, full_at, resume_below, changed_at) VALUES (p_name, p_full_at, p_resume_below, clock())
  ON CONFLICT (name) DO UPDATE SET full_at = excluded.full_at, resume_below = excluded.resume_below,
    overflowing = g.held >= excluded.full_at OR (g.overflowing AND g.held >= excluded.resume_below)
  WHERE (g.full_at, g.resume_below) IS DISTINCT FROM (excluded.full_at, excluded.resume_below)
$$;

CREATE OR REPLACE FUNCTION gates_release(p_names text[], p_counts bigint[]) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  r record;
BEGIN
  FOR r IN SELECT u.name, u.n FROM unnest(p_names, p_counts) u(name, n) ORDER BY u.name LOOP
    UPDATE gates x SET held = greatest(0, x.held - r.n),
      overflowing = x.overflowing AND x.held - r.n >= x.resume_below,
      changed_at = CASE WHEN x.overflowing AND x.held - r.n < x.resume_below THEN clock() ELSE x.changed_at END
    WHERE x.name = r.name;
  END LOOP;
END $$;
