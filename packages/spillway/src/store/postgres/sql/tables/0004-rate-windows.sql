-- Rates: buckets of any width instead of clock minutes.
--
-- Only new columns, because the functions of release 0.2.0 run on this table until the new ones are installed, a moment
-- later. Nothing writes win, minutes, counts and total any more; a later release drops them.

ALTER TABLE rates
  -- of its buckets, in epoch milliseconds, ascending. The first one is over: the base of the sums (functions/rates.sql)
  ADD COLUMN ends    bigint[] NOT NULL DEFAULT '{0}',
  ADD COLUMN sums    bigint[] NOT NULL DEFAULT '{0}', -- per bucket: the count of it and of all buckets before it
  ADD COLUMN span_ms bigint   NOT NULL DEFAULT 0,     -- how long a bucket is kept: the longest window that asks
  ALTER COLUMN win DROP NOT NULL,
  ALTER COLUMN minutes DROP NOT NULL,
  ALTER COLUMN counts DROP NOT NULL,
  ALTER COLUMN total DROP NOT NULL;

-- Minute m ends when minute m + 1 begins, and counts from its own beginning on.
UPDATE rates x SET span_ms = (x.win - 1) * 60000::bigint,
  ends = 0::bigint || (SELECT array_agg((u.m + 1) * 60000::bigint ORDER BY u.i)
    FROM unnest(x.minutes) WITH ORDINALITY u(m, i)),
  sums = 0::bigint || (SELECT array_agg(b.n ORDER BY b.i) FROM (
    SELECT sum(u.n) OVER (ORDER BY u.i)::bigint AS n, u.i FROM unnest(x.counts) WITH ORDINALITY u(n, i)) b);
