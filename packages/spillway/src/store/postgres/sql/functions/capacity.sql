-- Capacity gates: how many are held, and the hysteresis between full_at and resume_below. Taking capacity is a step of
-- accept.

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
