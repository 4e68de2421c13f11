-- What running handlers say of their progress. Not logged: it is worth nothing after a crash, and is written often.
CREATE UNLOGGED TABLE progress (
  id       uuid PRIMARY KEY,
  attempt  int NOT NULL,                     -- it is shown while this attempt runs
  value    real NOT NULL CHECK (value BETWEEN 0 AND 1),
  note     text,
  at       timestamptz NOT NULL,
  sweep_at timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX progress_sweep ON progress (sweep_at);
