-- The sliding window of a rate: one row per key with its minute buckets side by side, so that one row lock makes the
-- count exact.
--
-- These functions run only for rows from which a bucket has left the window, or whose clock went back. Calling a
-- function
-- costs more than the rest of the count, so the usual case is done inline where the rate is taken.

-- The buckets of a row from which some have left the window (or whose clock went back), with p_n more in this minute.
-- Calling a function costs more than all the rest of the count, so it is done for such rows alone.
CREATE OR REPLACE FUNCTION rate_minutes(p_minutes int[], p_now int, p_keep int) RETURNS int[]
  LANGUAGE sql IMMUTABLE AS $$
  SELECT coalesce((SELECT array_agg(m ORDER BY m) FROM unnest(p_minutes) m
        WHERE m > p_now - p_keep AND m < p_now), '{}') || p_now
$$;

CREATE OR REPLACE FUNCTION rate_counts(p_minutes int[], p_counts int[], p_now int, p_keep int, p_n int) RETURNS int[]
  LANGUAGE sql IMMUTABLE AS $$
  SELECT coalesce((SELECT array_agg(c ORDER BY m) FROM unnest(p_minutes, p_counts) u(m, c)
        WHERE m > p_now - p_keep AND m < p_now), '{}')
    || (p_n + coalesce((SELECT sum(c)::int FROM unnest(p_minutes, p_counts) u(m, c) WHERE m >= p_now), 0))
$$;

-- How many minutes a row has to keep: those of the longest window that asked, while its counts are kept. Instances
-- whose windows differ count in the same rows, and none may take buckets from another.
CREATE OR REPLACE FUNCTION rate_span(p_kept int, p_window int, p_keep interval) RETURNS int
  LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN p_kept <= p_window THEN p_window
    ELSE greatest(p_window, least(p_kept, (extract(epoch FROM p_keep) / 60)::int)) END
$$;

CREATE OR REPLACE FUNCTION rate_used(p_minutes int[], p_counts int[], p_now int, p_window int) RETURNS bigint
  LANGUAGE sql IMMUTABLE AS $$
  SELECT coalesce(sum(c), 0) FROM unnest(p_minutes, p_counts) u(m, c) WHERE m > p_now - p_window
$$;

-- Milliseconds until the count in the window is at most p_below: the bucket that has to leave leaves it then.
CREATE OR REPLACE FUNCTION rate_wait_ms(
  p_minutes int[], p_counts int[], p_at timestamptz, p_window int, p_below bigint
) RETURNS bigint
  LANGUAGE sql IMMUTABLE AS $$
  SELECT greatest(1, ceil(extract(epoch FROM to_timestamp((min(m) + p_window)::bigint * 60) - p_at) * 1000))::bigint
  FROM (
    SELECT m, sum(c) OVER (ORDER BY m DESC) - c AS later
    FROM unnest(p_minutes, p_counts) u(m, c)
    WHERE m > floor(extract(epoch FROM p_at) / 60)::int - p_window AND c > 0
  ) b
  WHERE later <= p_below
$$;
