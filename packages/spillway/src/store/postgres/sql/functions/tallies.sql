-- Counts how many operations of a type are held. Each writing connection has rows of its own (part >= 0), so that two
-- connections never wait for each other. Long transactions share rows (part < 0): each takes one that is not locked.
--
-- These run with the settings of the functions that call them: setting the search_path again costs as much as counting.

CREATE OR REPLACE FUNCTION tally(p_worker uuid, p_part smallint, p_type text, p_n bigint) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  IF p_part >= 0 THEN
    INSERT INTO tallies AS x (worker, part, type, n) VALUES (p_worker, p_part, p_type, p_n)
      ON CONFLICT (worker, part, type) WHERE part >= 0 DO UPDATE SET n = x.n + excluded.n;
    RETURN;
  END IF;
  UPDATE tallies x SET n = x.n + p_n WHERE x.ctid = (
    SELECT y.ctid FROM tallies y WHERE y.part < 0 AND y.type = p_type LIMIT 1 FOR UPDATE SKIP LOCKED);
  IF NOT FOUND THEN
    INSERT INTO tallies (worker, part, type, n) VALUES ('00000000-0000-0000-0000-000000000000', -1, p_type, p_n);
  END IF;
END $$;

-- A step of accept. Counts what was written to the queue, p_n in all.
CREATE OR REPLACE FUNCTION tally_accepted(
  p_worker uuid, p_part smallint, p_types text[], p_verdicts text[], p_n bigint
) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  r record;
BEGIN
  IF p_n = 0 THEN RETURN; END IF;
  -- Mostly all are of one type: grouping them costs more than writing the row.
  IF p_part >= 0 AND p_types[1] = ALL (p_types) THEN
    INSERT INTO tallies AS x (worker, part, type, n) VALUES (p_worker, p_part, p_types[1], p_n)
      ON CONFLICT (worker, part, type) WHERE part >= 0 DO UPDATE SET n = x.n + excluded.n;
    RETURN;
  END IF;
  FOR r IN SELECT u.type, count(*) AS n FROM unnest(p_types, p_verdicts) u(type, verdict)
      WHERE u.verdict IN ('queue', 'execute') GROUP BY u.type ORDER BY u.type LOOP
    PERFORM tally(p_worker, p_part, r.type, r.n);
  END LOOP;
END $$;
