-- Rates: at most a given number per key in a sliding window. One row per key with its buckets side by side, so that one
-- row lock makes the count exact.
--
-- A bucket is known by the time at which it ends. It counts until the window has passed since then, so everything in it
-- counts for the whole window and for at most the bucket's width longer: the limit holds in any window, wherever that
-- begins. Ends do not move, so the reported wait stays true. Buckets store running sums: neither counting nor removing
-- walks over them, and width_bucket finds a bucket by bisection.
--
-- Windows (p_rate_minutes of accept and admit) below zero are seconds: any window of that length, with buckets of a
-- 60th of it. Above zero they are minutes: as many buckets of a clock minute count, the present one included. The
-- petitions count so, and release 0.2.0 knows only these; its calls and ours share rows during an upgrade.
--
-- rates_asked, rates_take, rates_return and rates_status are called by gates_take and run with the settings of accept.
-- The functions at the end are single expressions, which the planner puts in place: calling one would cost more than
-- the count.

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
  v_now bigint := floor(extract(epoch FROM p_at) * 1000);
  v_longer boolean;
BEGIN
  WITH up AS (
    INSERT INTO rates AS x (key, ends, sums, span_ms, expires_at, sweep_at)
    SELECT k.key, ARRAY[0, (v_now / rate_width_ms(k.win) + 1) * rate_width_ms(k.win)], ARRAY[0, k.n],
      rate_window_ms(k.win), p_at + k.keep * interval '1 minute', p_at + k.keep * interval '1 minute'
    FROM unnest(p_keys, p_asked, p_windows, p_keep) k(key, n, win, keep)
    ON CONFLICT (key) DO UPDATE SET
      -- From the last bucket that is over, which is the base now. The last bucket takes more while it ends no earlier
      -- than ours would: later with a clock that went back, or a wider bucket of another process.
      ends = x.ends[width_bucket(v_now - greatest(x.span_ms, excluded.span_ms), x.ends):]
        || CASE WHEN x.ends[cardinality(x.ends)] >= excluded.ends[2] THEN '{}' ELSE excluded.ends[2:] END,
      sums = x.sums[width_bucket(v_now - greatest(x.span_ms, excluded.span_ms), x.ends):cardinality(x.sums)
          - CASE WHEN x.ends[cardinality(x.ends)] >= excluded.ends[2] THEN 1 ELSE 0 END]
        || (x.sums[cardinality(x.sums)] + excluded.sums[2]),
      -- Instances whose windows differ count in the same rows: the longest one decides, while its counts are kept.
      span_ms = greatest(excluded.span_ms, least(x.span_ms,
          (date_part('epoch', greatest(x.expires_at, excluded.expires_at) - p_at) * 1000)::bigint)),
      expires_at = greatest(x.expires_at, excluded.expires_at)
    RETURNING x.sums[cardinality(x.sums)] - x.sums[1] AS used, x.ends[2] AS first, x.sums[2] - x.sums[1] AS first_n
  ), seen AS (
    SELECT array_agg(up.used) AS used, array_agg(up.first) AS firsts, array_agg(up.first_n) AS first_ns FROM up
  )
  SELECT array_agg(u.most - (u.used - u.asked)), coalesce(bool_or(u.used > u.most), false), bool_or(u.first_n = 0),
      bool_or(u.first <= v_now - u.win), array_agg(greatest(1, u.first + u.win - v_now))
    INTO left_now, is_tight, is_odd, v_longer, waits_ms
    FROM (
      SELECT s.used, s.asked, s.most, rate_window_ms(s.win) AS win, s.first, s.first_n
      FROM seen, unnest(seen.used, p_asked, p_limits, p_windows, seen.firsts, seen.first_ns)
        s(used, asked, most, win, first, first_n)
    ) u;
  IF v_longer THEN
    -- Only what is in the window of this process counts here.
    is_odd := true;
    SELECT array_agg(u.most - (k.used - u.asked) ORDER BY u.i), bool_or(k.used > u.most) INTO left_now, is_tight
      FROM unnest(p_keys, p_asked, p_limits, p_windows) WITH ORDINALITY u(key, asked, most, win, i)
      JOIN rates x ON x.key = u.key,
        LATERAL (SELECT rate_sum_since(x.ends, x.sums, v_now - rate_window_ms(u.win))) k(used);
  END IF;
END $$;

-- Takes back what was asked for and not given.
CREATE OR REPLACE FUNCTION rates_return(p_keys uuid[], p_asked int[], p_gave int[]) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE rates x SET sums = x.sums[1:cardinality(x.sums) - 1] || (x.sums[cardinality(x.sums)] - u.back)
    FROM unnest(p_keys, p_asked, p_gave) k(key, asked, gave), LATERAL (SELECT k.asked - k.gave) u(back)
    WHERE x.key = k.key AND u.back > 0;
END $$;

-- Per key the milliseconds until a slot is free, from all buckets. A slot is free when fewer than the limit count;
-- after the limit was lowered more may count than it allows. The bucket that has to leave is the first whose sum is
-- at least that of all buckets without what may stay.
CREATE OR REPLACE FUNCTION rates_waits(p_keys uuid[], p_limits int[], p_windows int[], p_at timestamptz)
  RETURNS bigint[]
  LANGUAGE sql STABLE AS $$
  SELECT array_agg(CASE WHEN b.used = 0 THEN 1
      ELSE greatest(1, x.ends[1 + width_bucket(
          x.sums[cardinality(x.sums)] - greatest(1, least(u.most, b.used)), x.sums)]
        + rate_window_ms(u.win) - t.now) END ORDER BY u.i)
  FROM (SELECT floor(extract(epoch FROM p_at) * 1000)::bigint) t(now),
    unnest(p_keys, p_windows, p_limits) WITH ORDINALITY u(key, win, most, i) JOIN rates x ON x.key = u.key,
    LATERAL (SELECT rate_sum_since(x.ends, x.sums, t.now - rate_window_ms(u.win)) AS used) b
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

-- How long a bucket counts after its end; a clock minute counts from its beginning on. Both functions choose by
-- greatest, because the value of the other kind is below zero, and CASE costs more.
CREATE OR REPLACE FUNCTION rate_window_ms(p_window int) RETURNS bigint
  LANGUAGE sql IMMUTABLE AS $$
  SELECT greatest((p_window - 1) * 60000::bigint, p_window * -1000::bigint)
$$;

CREATE OR REPLACE FUNCTION rate_width_ms(p_window int) RETURNS bigint
  LANGUAGE sql IMMUTABLE AS $$
  SELECT greatest(least(p_window, 1) * 60000::bigint, p_window * -50::bigint / 3)
$$;

-- What is in the buckets that end after p_since.
CREATE OR REPLACE FUNCTION rate_sum_since(p_ends bigint[], p_sums bigint[], p_since bigint) RETURNS bigint
  LANGUAGE sql IMMUTABLE AS $$
  SELECT p_sums[cardinality(p_sums)] - p_sums[greatest(1, width_bucket(p_since, p_ends))]
$$;
