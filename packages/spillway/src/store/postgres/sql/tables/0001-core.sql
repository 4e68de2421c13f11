-- The queue: lanes, operations, leases, and what the gates count.
--
-- Invariant, audited by audit(): a lane with depth > 0 is in exactly one of ready, parked or a row of leases; a lane
-- with depth 0 is in none of them. To move a lane between them, hold the lane's row lock, or the lock of the ready or
-- parked row that is deleted.
--
-- Lock order everywhere: workers, leases, idempotency (by key), rates (by key), gates (by name), lanes (by id), ops,
-- ready and parked, tallies, and last the ledger's head. Accepting never waits for another process's lease row.
-- Claiming skips locked rows.

CREATE TABLE lanes (
  id         uuid PRIMARY KEY,               -- 128 bits of sha256(queue, NUL, partition), made by the caller
  queue      text NOT NULL,
  partition  text NOT NULL,
  head       bigint NOT NULL DEFAULT 0,      -- everything up to here has left the lane
  tail       bigint NOT NULL DEFAULT 0,      -- the last sequence given
  depth      bigint NOT NULL DEFAULT 0,      -- operations in the lane (cancelled ones leave gaps between head and tail)
  -- up to here operations are claimed one at a time (a worker died over them)
  careful    bigint NOT NULL DEFAULT 0,
  running    boolean NOT NULL DEFAULT false, -- is its first operation known to run?
  pace_ms    real,                           -- moving average of milliseconds per operation while the lane was busy
  moved_at   timestamptz NOT NULL,           -- last accepted into the empty lane, or last settled
  sweep_at   timestamptz NOT NULL,           -- when the sweep looks at it; after the insert only the sweep changes it
  CHECK (head >= 0 AND head <= tail),
  CHECK (depth >= 0 AND depth <= tail - head)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX lanes_sweep ON lanes (sweep_at);

CREATE TABLE ops (
  lane         uuid NOT NULL,
  seq          bigint NOT NULL,
  id           uuid NOT NULL,
  type         text NOT NULL,
  priority     smallint NOT NULL CHECK (priority BETWEEN 1 AND 10),
  stamp        bigint NOT NULL,              -- virtual start time: the order among lanes of one priority
  identity     text NOT NULL,
  payload      json NOT NULL,
  accepted_at  timestamptz NOT NULL,
  not_before   timestamptz,
  started_at   timestamptz,
  attempts     int NOT NULL DEFAULT 0,       -- deliveries that ended without a settled result
  max_attempts int NOT NULL CHECK (max_attempts >= 1),
  timeout_ms   int NOT NULL CHECK (timeout_ms >= 1),
  error        text,
  trace        text NOT NULL DEFAULT '',
  idem         uuid,                         -- its row in idempotency, answered when it is settled
  gate         text,                         -- the capacity gate that holds a place for it
  PRIMARY KEY (lane, seq)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000);
CREATE UNIQUE INDEX ops_id ON ops (id);

-- Holds all that a claim has to know of a lane, so that claiming does not read the lanes themselves.
CREATE TABLE ready (
  lane      uuid NOT NULL,
  priority  smallint NOT NULL,
  stamp     bigint NOT NULL,
  -- of its first operation: a process claims what it can run. Or a label: the type, a
  type      text NOT NULL,
                                             -- space and a digest, of a lane that was left to those who announced it
  -- where to look for the first one; the lane's own head may be further by now
  head      bigint NOT NULL,
  -- at least so many waited when it became ready: how large a claim should be
  depth     bigint NOT NULL,
  careful   boolean NOT NULL,
  queue     text NOT NULL,
  partition text NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ready_order ON ready (priority, stamp);

-- For a process that finds lanes of one type among those of others. Not the column itself, or the planner may think
-- the order above as good, and wade through them all.
CREATE INDEX ready_type ON ready (type, (priority + 0), stamp);

CREATE TABLE parked (
  lane   uuid PRIMARY KEY,
  until  timestamptz NOT NULL,
  reason text NOT NULL CHECK (reason IN ('delay', 'retry', 'pause'))
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX parked_until ON parked (until);

-- One row per process that runs operations; its leases are good while the row is there.
CREATE TABLE workers (
  id         uuid PRIMARY KEY,
  name       text NOT NULL,
  started_at timestamptz NOT NULL,
  until      timestamptz NOT NULL,
  running    json NOT NULL DEFAULT '{}',     -- operations it runs now, per type
  announced  jsonb NOT NULL DEFAULT '{}'     -- what of a type it may run, where that is not all, by label
) WITH (fillfactor = 50);

-- One row per claim. The fence grows with each claim; settling needs the row.
CREATE SEQUENCE fences;

CREATE TABLE leases (
  fence      bigint PRIMARY KEY,
  worker     uuid NOT NULL,
  lanes      uuid[] NOT NULL,                -- by id
  uptos      bigint[] NOT NULL,              -- per lane: the last sequence that was handed out
  claimed_at timestamptz NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);

-- The largest stamp ever claimed: the virtual time of an empty priority level. A sequence, because it is read and
-- moved without a row lock; a lost update only costs a little fairness.
CREATE SEQUENCE stamps MINVALUE 0 START 0;

CREATE TABLE pauses (
  queue     text NOT NULL,
  -- NULL: every lane of the queue. Of no queue (''): a type, wherever it comes first
  partition text,
  since     timestamptz NOT NULL,
  UNIQUE NULLS NOT DISTINCT (queue, partition)
);

-- Running operations whose handler can stop and was asked to.
CREATE TABLE cancels (
  id       uuid PRIMARY KEY,
  asked_at timestamptz NOT NULL
);
CREATE INDEX cancels_asked ON cancels (asked_at);

CREATE TABLE history (
  id           uuid NOT NULL,
  finished_at  timestamptz NOT NULL,
  status       text NOT NULL CHECK (status IN ('completed', 'cancelled')),
  type         text NOT NULL,
  queue        text NOT NULL,
  partition    text NOT NULL,
  priority     smallint NOT NULL,
  identity     text NOT NULL,
  accepted_at  timestamptz NOT NULL,
  started_at   timestamptz,
  attempts     int NOT NULL,
  max_attempts int NOT NULL,
  error        text,
  result       json,
  trace        text NOT NULL
) PARTITION BY RANGE (finished_at);
CREATE INDEX history_id ON history (id);

-- Catches what no partition covers yet, so that settling never fails for want of one.
CREATE TABLE history_rest PARTITION OF history DEFAULT;
CREATE INDEX history_rest_finished ON history_rest (finished_at);

CREATE TABLE history_spans (
  name    text PRIMARY KEY,
  from_at timestamptz NOT NULL,
  to_at   timestamptz NOT NULL
);

CREATE TABLE dead_letters (
  id           uuid PRIMARY KEY,
  died_at      timestamptz NOT NULL,
  lane         uuid NOT NULL,
  seq          bigint NOT NULL,              -- its place in the lane: the order of redriving
  queue        text NOT NULL,
  partition    text NOT NULL,
  type         text NOT NULL,
  priority     smallint NOT NULL,
  identity     text NOT NULL,
  payload      json NOT NULL,
  accepted_at  timestamptz NOT NULL,
  started_at   timestamptz,
  attempts     int NOT NULL,
  max_attempts int NOT NULL,
  timeout_ms   int NOT NULL,
  error        text,
  result       json,
  trace        text NOT NULL,
  gate         text
);
CREATE INDEX dead_letters_queue ON dead_letters (queue, id);
CREATE INDEX dead_letters_lane ON dead_letters (lane);

CREATE TABLE idempotency (
  key        uuid PRIMARY KEY,               -- 128 bits of sha256(route, identity, key)
  request    uuid NOT NULL,                  -- 128 bits of sha256(body)
  op         uuid NOT NULL,
  answer     json,                           -- NULL while the first request is in progress
  expires_at timestamptz NOT NULL
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- In the order of time, so that a row is added at its end; the sweep follows it. A BRIN index would know nothing any
-- more once new rows stand where old ones were removed.
CREATE INDEX idempotency_expires ON idempotency (expires_at);

-- How many operations of a type are held: the sum over the rows. Each connection that writes has rows of its own, so
-- that counting never makes two of them wait for each other.
CREATE TABLE tallies (
  worker uuid NOT NULL,
  part   smallint NOT NULL,
  type   text NOT NULL,
  n      bigint NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE UNIQUE INDEX tallies_writer ON tallies (worker, part, type) WHERE part >= 0;

-- Rows of transactions that may last: whichever is free takes the next count, so there are as many as such
-- transactions ran at once.
CREATE INDEX tallies_shared ON tallies (type) WHERE part < 0;

CREATE TABLE gates (
  name         text PRIMARY KEY,
  held         bigint NOT NULL DEFAULT 0 CHECK (held >= 0),
  full_at      bigint NOT NULL CHECK (full_at >= 1),
  resume_below bigint NOT NULL CHECK (resume_below BETWEEN 1 AND full_at),
  overflowing  boolean NOT NULL DEFAULT false,
  changed_at   timestamptz NOT NULL
) WITH (fillfactor = 50);

-- One row per limited key: its minute buckets side by side, so that one row lock makes the count exact.
CREATE TABLE rates (
  key       uuid PRIMARY KEY,
  win       int NOT NULL,                    -- minutes that are kept: the longest window that asks
  minutes   int[] NOT NULL,                  -- epoch minutes, ascending
  counts    int[] NOT NULL,
  total     int NOT NULL,                    -- of all counts: what is used, unless a bucket has left the window since
  expires_at timestamptz NOT NULL,
  -- when the sweep looks at it. Each request moves expires_at; only the sweep changes this
  sweep_at   timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX rates_sweep ON rates (sweep_at);

-- Whose turn it is to sweep, over all processes: nobody's before next_at. By the real time, which no test moves.
CREATE TABLE sweep_turn (
  one     boolean PRIMARY KEY DEFAULT true CHECK (one),
  next_at timestamptz NOT NULL
) WITH (fillfactor = 50);
INSERT INTO sweep_turn (next_at) VALUES ('-infinity');

CREATE TABLE halts (
  scope  text PRIMARY KEY,
  reason text NOT NULL,
  since  timestamptz NOT NULL
);

-- Places in a pool of connections, counted per process: a process that dies gives back what it held.
CREATE TABLE connection_pools (
  pool text PRIMARY KEY
);

CREATE TABLE connections (
  pool     text NOT NULL,
  identity text NOT NULL,
  worker   uuid NOT NULL,
  held     int NOT NULL CHECK (held > 0),
  PRIMARY KEY (pool, identity, worker)
) WITH (fillfactor = 50);

-- The last change that a process made to its places in a pool: one that arrives behind a later one is void.
CREATE TABLE connection_writers (
  pool   text NOT NULL,
  worker uuid NOT NULL,
  seq    bigint NOT NULL,
  PRIMARY KEY (pool, worker)
) WITH (fillfactor = 50);
