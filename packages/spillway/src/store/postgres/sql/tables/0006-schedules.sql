-- Recurring work: one row per schedule, by its name. See functions/schedules.sql.

CREATE TABLE schedules (
  name     text PRIMARY KEY,
  cron     text NOT NULL,
  timezone text NOT NULL,
  type     text NOT NULL,                    -- of its operations, for people who look
  next_at  timestamptz NOT NULL,             -- the first due time that was not handled; infinity: there is none
  last_at  timestamptz,                      -- the last due time that was handled
  seen_at  timestamptz NOT NULL              -- when a process that defines it was last seen
);
