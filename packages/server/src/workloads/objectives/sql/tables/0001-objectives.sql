-- Service level objectives: counts per minute and per hour. They lock nothing else.

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
