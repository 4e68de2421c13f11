/** Made from the .sql files by scripts/generate-sql.mjs; not meant to be edited. */
export const objectivesSql = {
  name: 'objectives',
  tables: [
    {
      id: '0001-objectives',
      sql: `-- Service level objectives: counts per minute and per hour. They lock nothing else.

-- Sums, never samples. Each count stands in its minute and in its hour: short windows are read from the first, long
-- ones from the second, and nothing has to be rolled up later.
CREATE TABLE objective_counts (
  objective text NOT NULL,
  span      text NOT NULL CHECK (span IN ('minute', 'hour')),
  bucket    timestamptz NOT NULL,
  good      double precision NOT NULL CHECK (good >= 0),
  total     double precision NOT NULL,
  PRIMARY KEY (objective, span, bucket),
  CHECK (good <= total)
) WITH (fillfactor = 50);

-- What a process sent last: a batch whose answer was lost is sent again, and counts once.
CREATE TABLE objective_writers (
  writer uuid PRIMARY KEY,
  sent   bigint NOT NULL,
  at     timestamptz NOT NULL
) WITH (fillfactor = 50);
`,
    },
  ],
  functions: [
    {
      name: 'counts',
      sql: `-- Adds counts, sums them over a window, and removes old buckets. Sums, never samples: each count is in its minute and
-- in its hour. Short windows read the first, long ones the second, and nothing has to be rolled up later.

CREATE OR REPLACE FUNCTION objective_add(
  p_writer uuid, p_number bigint, p_objectives text[], p_good double precision[], p_total double precision[]
) RETURNS boolean
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  INSERT INTO objective_writers AS w (writer, sent, at) VALUES (p_writer, p_number, t)
    ON CONFLICT (writer) DO UPDATE SET sent = EXCLUDED.sent, at = EXCLUDED.at WHERE w.sent < EXCLUDED.sent;
  IF NOT FOUND THEN RETURN false; END IF;
  INSERT INTO objective_counts AS c (objective, span, bucket, good, total)
    SELECT u.objective, s.span, date_trunc(s.span, t, 'UTC'), u.good, u.total
    FROM unnest(p_objectives, p_good, p_total) u(objective, good, total), (VALUES ('minute'), ('hour')) s(span)
    ORDER BY u.objective, s.span
    ON CONFLICT (objective, span, bucket) DO UPDATE SET good = c.good + EXCLUDED.good, total = c.total + EXCLUDED.total;
  RETURN true;
END $$;

-- A bucket counts while its beginning lies in the window.
CREATE OR REPLACE FUNCTION objective_sums(

)
RETURNS TABLE (objective text, hour_good double precision, hour_total double precision, month_good double precision,
    month_total double precision)
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  RETURN QUERY SELECT c.objective,
      coalesce(sum(c.good) FILTER (WHERE c.span = 'minute'), 0),
        coalesce(sum(c.total) FILTER (WHERE c.span = 'minute'), 0),
      coalesce(sum(c.good) FILTER (WHERE c.span = 'hour'), 0), coalesce(sum(c.total) FILTER (WHERE c.span = 'hour'), 0)
    FROM objective_counts c
    WHERE c.bucket > t - CASE c.span WHEN 'minute' THEN interval '1 hour' ELSE interval '30 days' END
    GROUP BY c.objective;
END $$;

CREATE OR REPLACE FUNCTION objective_sweep() RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_n int;
BEGIN
  IF NOT pg_try_advisory_xact_lock(hashtext('spillway.objective_sweep'), hashtext(current_schema())) THEN
    RETURN 0;
  END IF;
  DELETE FROM objective_counts c
    WHERE c.bucket < t - CASE c.span WHEN 'minute' THEN interval '2 hours' ELSE interval '31 days' END;
  GET DIAGNOSTICS v_n = ROW_COUNT;
  -- None is silent for so long and then sends a batch again.
  DELETE FROM objective_writers w WHERE w.at < t - interval '1 day';
  RETURN v_n;
END $$;
`,
    },
  ],
}
