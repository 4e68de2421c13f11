-- The last error of an operation that failed: its code and status for the caller, its stack for operators. A row of its
-- own, so that operations that never fail carry nothing of it.
CREATE TABLE failures (
  id          uuid PRIMARY KEY,
  attempt     int NOT NULL,                  -- which attempt it ended
  -- What the handler said with FailOperation; NULL: an error that it did not expect.
  code        text,
  http_status smallint,
  keep_letter boolean NOT NULL,              -- a dead letter stays, although the caller was answered
  stack       text NOT NULL,
  sweep_at    timestamptz NOT NULL
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX failures_sweep ON failures (sweep_at);

-- A failure that the caller was answered with leaves no dead letter: it is history. NOT VALID: no old row can violate
-- it, and the table need not be read.
ALTER TABLE history DROP CONSTRAINT history_status_check;
ALTER TABLE history ADD CONSTRAINT history_status_check
  CHECK (status IN ('completed', 'cancelled', 'failed')) NOT VALID;
