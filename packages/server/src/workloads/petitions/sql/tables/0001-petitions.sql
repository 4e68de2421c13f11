-- Petitions.
--
--   RECEIVED ──► DELIBERATING ──► ACKNOWLEDGED │ REFERRED │ ESCALATED │ DEFERRED │ NO_RESPONSE   (final)
--      └──────────────────────► ACKNOWLEDGED │ ESCALATED
--      └── withdrawn by its submitter ──► ACKNOWLEDGED, reason WITHDRAWN
--
-- A row remembers the state it came from, so that the legal moves are a CHECK and not only code. petition_states
-- counts by state in the same transactions: a list's total and the gauges cost one row each.
--
-- Lock order: petitions, gates, (accepting: lanes), petition_states (by state), ledger head. Accepting only inserts
-- petitions, so it never waits for one. A transaction that touches petition_blocks or the count of RECEIVED holds the
-- gate, so the order of the rest does not matter.

CREATE TABLE petitions (
  id           uuid PRIMARY KEY,
  type         text NOT NULL CHECK (type IN ('GENERAL', 'CESSATION', 'GRIEVANCE', 'COLLABORATION', 'META')),
  state        text NOT NULL,
  came_from    text,
  text         text NOT NULL CHECK (char_length(text) BETWEEN 1 AND 10000),
  content_hash text NOT NULL CHECK (octet_length(content_hash) = 64),
  realm        text CHECK (char_length(realm) BETWEEN 1 AND 100),
  submitter    text NOT NULL,                -- subject, submitter_id, or address: and the client's address
  fate_reason  text,
  version      int NOT NULL DEFAULT 1,
  created_at   timestamptz NOT NULL,
  updated_at   timestamptz NOT NULL,
  CONSTRAINT petitions_moves CHECK (CASE WHEN came_from IS NULL THEN state = 'RECEIVED' ELSE (came_from, state) IN (
    ('RECEIVED', 'DELIBERATING'), ('RECEIVED', 'ACKNOWLEDGED'), ('RECEIVED', 'ESCALATED'),
    ('DELIBERATING', 'ACKNOWLEDGED'), ('DELIBERATING', 'REFERRED'), ('DELIBERATING', 'ESCALATED'),
      ('DELIBERATING', 'DEFERRED'), ('DELIBERATING', 'NO_RESPONSE')) END)
);
CREATE INDEX petitions_by_state ON petitions (state, id);

CREATE TABLE petition_states (
  state text PRIMARY KEY,
  n     bigint NOT NULL DEFAULT 0 CHECK (n >= 0)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
INSERT INTO petition_states (state)
  VALUES ('RECEIVED'), ('DELIBERATING'), ('ACKNOWLEDGED'), ('REFERRED'), ('ESCALATED'), ('DEFERRED'), ('NO_RESPONSE');

-- Blocks of a submitter since the last one that was witnessed.
CREATE TABLE petition_blocks (
  submitter text PRIMARY KEY,
  minute    bigint NOT NULL,                 -- epoch minute of the last event
  pending   bigint NOT NULL CHECK (pending >= 0)
) WITH (fillfactor = 50);
CREATE INDEX petition_blocks_pending ON petition_blocks (minute) WHERE pending > 0;
CREATE INDEX petition_blocks_told ON petition_blocks (minute) WHERE pending = 0;

-- Few among many: each instance follows them, to log them.
CREATE INDEX ledger_overflows ON ledger (seq)
  WHERE type IN ('petition.queue.overflow.started', 'petition.queue.overflow.ended');
