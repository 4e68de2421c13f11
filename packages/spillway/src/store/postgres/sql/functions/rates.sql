-- Rates: a sliding window of minutes. One row per key with its minute buckets side by side, so that one row lock makes
-- the count exact.
--
-- rates_asked, rates_take, rates_return and rates_status are called by gates_take and run with the settings of accept.
-- The small functions below them run only for rows from which a bucket has left the window, or whose clock went back:
-- calling a function costs more than the rest of the count, so rates_take does the usual case inline.

-- How often each key is asked for by items that are not decided.
CREATE OR REPLACE FUNCTION rates_asked(p_ix int[], p_item int[], p_decided text[], p_keys int) RETURNS int[]
  LANGUAGE sql STABLE AS $$
  SELECT array_agg(coalesce(x.n, 0)::int ORDER BY k.i) FROM generate_series(1, p_keys) k(i)
    LEFT JOIN (SELECT u.ix, count(*) AS n FROM unnest(p_ix, p_item) WITH ORDINALITY u(ix, item, i)
      WHERE p_decided[coalesce(u.item, u.i)] IS NULL GROUP BY u.ix) x ON x.ix = k.i
$$;

-- Adds what is asked for, in key order; what does not fit is taken back by rates_return. left_now: how many fitted
-- before. waits_ms: when the next slot is free, that is when the oldest bucket leaves. is_odd: that has to be computed
-- from all buckets, because refunds emptied the oldest one, or because rows keep more than the window of this process.
CREATE OR REPLACE FUNCTION rates_take(
  p_keys uuid[], p_asked int[], p_limits int[], p_windows int[], p_keep int[], p_at timestamptz,
  OUT left_now int[], OUT waits_ms bigint[], OUT is_tight boolean, OUT is_odd boolean
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_minute int := floor(extract(epoch FROM p_at) / 60)::int;
  v_longer boolean;
BEGIN
  WITH up AS (
    INSERT INTO rates AS x (key, win, minutes, counts, total, expires_at, sweep_at)
    SELECT k.key, k.win, ARRAY[v_minute], ARRAY[k.n], k.n, p_at + k.keep * interval '1 minute',
      p_at + k.keep * interval '1 minute'
    FROM unnest(p_keys, p_asked, p_windows, p_keep) k(key, n, win, keep)
    ON CONFLICT (key) DO UPDATE SET
      minutes = CASE WHEN x.minutes[1] > v_minute - excluded.win
        THEN CASE WHEN x.minutes[cardinality(x.minutes)] >= v_minute THEN x.minutes ELSE x.minutes || v_minute END
        ELSE rate_minutes(x.minutes, v_minute,
          rate_span(x.win, excluded.win, greatest(x.expires_at, excluded.expires_at) - p_at)) END,
      counts = CASE WHEN x.minutes[1] > v_minute - excluded.win
        THEN CASE WHEN x.minutes[cardinality(x.minutes)] >= v_minute
          THEN x.counts[1:cardinality(x.counts) - 1] || (x.counts[cardinality(x.counts)] + excluded.total)
          ELSE x.counts || excluded.total END
        ELSE rate_counts(x.minutes, x.counts, v_minute,
          rate_span(x.win, excluded.win, greatest(x.expires_at, excluded.expires_at) - p_at), excluded.total) END,
      total = excluded.total + CASE WHEN x.minutes[1] > v_minute - excluded.win THEN x.total
        ELSE rate_used(x.minutes, x.counts, v_minute,
          rate_span(x.win, excluded.win, greatest(x.expires_at, excluded.expires_at) - p_at))::int END,
      win = rate_span(x.win, excluded.win, greatest(x.expires_at, excluded.expires_at) - p_at),
      expires_at = greatest(x.expires_at, excluded.expires_at)
    RETURNING x.total, x.minutes[1] AS first, x.counts[1] AS first_n
  ), seen AS (
    SELECT array_agg(up.total) AS totals, array_agg(up.first) AS firsts, array_agg(up.first_n) AS first_ns FROM up
  )
  SELECT array_agg(u.most - (u.total - u.asked)), coalesce(bool_or(u.total > u.most), false), bool_or(u.first_n = 0),
      bool_or(u.first <= v_minute - u.win),
      array_agg(greatest(1, ceil(((u.first + u.win)::bigint * 60 - date_part('epoch', p_at)) * 1000))::bigint)
    INTO left_now, is_tight, is_odd, v_longer, waits_ms
    FROM seen, unnest(seen.totals, p_asked, p_limits, p_windows, seen.firsts, seen.first_ns)
      u(total, asked, most, win, first, first_n);
  IF v_longer THEN
    -- Only what is in the window of this process counts here.
    is_odd := true;
    SELECT array_agg(u.most - (k.used - u.asked) ORDER BY u.i), bool_or(k.used > u.most) INTO left_now, is_tight
      FROM unnest(p_keys, p_asked, p_limits, p_windows) WITH ORDINALITY u(key, asked, most, win, i)
      JOIN rates x ON x.key = u.key,
        LATERAL (SELECT rate_used(x.minutes, x.counts, v_minute, u.win)::int) k(used);
  END IF;
END $$;

-- Takes back what was asked for and not given.
CREATE OR REPLACE FUNCTION rates_return(p_keys uuid[], p_asked int[], p_gave int[]) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE rates x SET total = x.total - u.back,
      counts = x.counts[1:cardinality(x.counts) - 1] || (x.counts[cardinality(x.counts)] - u.back)
    FROM unnest(p_keys, p_asked, p_gave) k(key, asked, gave), LATERAL (SELECT k.asked - k.gave) u(back)
    WHERE x.key = k.key AND u.back > 0;
END $$;

-- Per key the milliseconds until a slot is free, from all buckets. A slot is free when fewer than the limit count;
-- after the limit was lowered more may count than it allows.
CREATE OR REPLACE FUNCTION rates_waits(p_keys uuid[], p_limits int[], p_windows int[], p_at timestamptz)
  RETURNS bigint[]
  LANGUAGE sql STABLE AS $$
  SELECT array_agg(coalesce(rate_wait_ms(x.minutes, x.counts, p_at, u.win, greatest(0, least(u.most,
      rate_used(x.minutes, x.counts, floor(extract(epoch FROM p_at) / 60)::int, u.win)) - 1)), 1) ORDER BY u.i)
  FROM unnest(p_keys, p_windows, p_limits) WITH ORDINALITY u(key, win, most, i) JOIN rates x ON x.key = u.key
$$;

-- Per item the tier that matters. Of a refused item, among the tiers that are used up, the one that frees last (it says
-- when to come back); of an admitted one the tier with the least left.
CREATE OR REPLACE FUNCTION rates_status(
  p_ix int[], p_item int[], p_items int, p_verdicts text[], p_left int[], p_gave int[], p_waits_ms bigint[],
  OUT tiers int[], OUT rates_left bigint[], OUT rates_reset_ms bigint[]
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  r record;
BEGIN
  IF cardinality(p_item) = 0 THEN
    SELECT array_agg(u.i), array_agg(greatest(0, p_left[u.ix] - p_gave[u.ix])), array_agg(p_waits_ms[u.ix])
      INTO tiers, rates_left, rates_reset_ms FROM unnest(p_ix) WITH ORDINALITY u(ix, i);
    RETURN;
  END IF;
  tiers := array_fill(NULL::int, ARRAY[p_items]);
  rates_left := array_fill(NULL::bigint, ARRAY[p_items]);
  rates_reset_ms := array_fill(NULL::bigint, ARRAY[p_items]);
  FOR r IN SELECT DISTINCT ON (u.item) u.item, u.i AS tier, greatest(0, k.left_now) AS left_now, k.wait
      FROM unnest(p_item, p_ix) WITH ORDINALITY u(item, ix, i),
        LATERAL (SELECT p_left[u.ix] - p_gave[u.ix] AS left_now, p_waits_ms[u.ix] AS wait) k
      ORDER BY u.item, least(1, greatest(0, k.left_now)),
        CASE WHEN p_verdicts[u.item] = 'rate_limited' THEN - k.wait END, k.left_now, u.i LOOP
    tiers[r.item] := r.tier; rates_left[r.item] := r.left_now; rates_reset_ms[r.item] := r.wait;
  END LOOP;
END $$;

-- The buckets of a row from which some have left the window, with p_n more in this minute.
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
