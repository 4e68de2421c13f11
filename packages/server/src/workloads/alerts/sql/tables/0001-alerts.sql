-- Alerts.
--
-- An alert is a name and its labels; alert_states has one row for each. A change of its status holds that row from the
-- decision to the commit, so that of several processes that see the same alert one reports it, and changes are queued
-- for delivery in the order in which they happened. It fires as long as any process reports it: alert_reporters names
-- them, each until a time, because a process that dies cannot withdraw its report.
--
-- Lock order: alert_states, alerts, then the core's order.

CREATE TABLE alert_states (
  key         uuid PRIMARY KEY,              -- 128 bits of sha256(name, labels)
  name        text NOT NULL,
  labels      json NOT NULL,
  status      text NOT NULL CHECK (status IN ('firing', 'resolved')),
  severity    text NOT NULL CHECK (severity IN ('warning', 'critical')),
  message     text NOT NULL,
  annotations json NOT NULL,
  alert       uuid NOT NULL,                 -- its last change
  seq         bigint NOT NULL,
  at          timestamptz NOT NULL
);

CREATE TABLE alert_reporters (
  key      uuid NOT NULL REFERENCES alert_states ON DELETE CASCADE,
  reporter uuid NOT NULL,
  until    timestamptz NOT NULL,             -- renewed while it sees what it reported
  PRIMARY KEY (key, reporter)
);

CREATE TABLE alerts (
  seq         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  id          uuid NOT NULL UNIQUE,
  key         uuid NOT NULL,
  name        text NOT NULL,
  labels      json NOT NULL,
  status      text NOT NULL CHECK (status IN ('firing', 'resolved')),
  severity    text NOT NULL CHECK (severity IN ('warning', 'critical')),
  message     text NOT NULL,
  annotations json NOT NULL,
  at          timestamptz NOT NULL,          -- whole milliseconds
  delivery    text NOT NULL CHECK (delivery IN ('none', 'waiting', 'delivered', 'failed', 'dropped')),
  attempts    int NOT NULL DEFAULT 0,        -- the receiver may have seen it from the first on
  operation   uuid                           -- that delivers it
);
CREATE INDEX alerts_waiting ON alerts (seq) WHERE delivery = 'waiting';
