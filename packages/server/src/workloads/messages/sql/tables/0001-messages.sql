-- Messages: a log per partition, a cursor per partition and consumer group.
--
--   push ──► mq_messages (partition, seq) ──► for each group: idle ──push──► ready ──pop──► leased ──all acked──►
-- idle or ready
--                                                                              ▲              │
--                                                                              └── expired ◄──┘  (every delivery
-- counts)
--
-- A partition is a lane (the same 128 bits), so what is pushed at once and what was queued come in one order. Its
-- messages have numbers of their own, given under the partition's row lock: without gaps, in commit order. A cursor
-- that has passed a number can never have missed a smaller one.
--
-- Invariant: a group that has something to read in a partition (head < tail) has exactly one of a row in mq_ready and
-- a lease. Push adds the row where the group was idle. Ending a lease adds it where there is more, and reads the tail
-- under a share lock of the partition before it decides that there is not.
--
-- Of a lease's messages, batch are those delivered, open those not acked yet, done all beyond head that are settled.
-- Head moves when the last one is acked: to before the first that has to be delivered again. tries counts failed
-- deliveries. A batch that expired is delivered one by one up to careful: what fails alone is at fault alone.
--
-- Lock order: lanes, mq_partitions (by id), mq_messages; mq_cursors (by partition, group), mq_partitions, mq_messages,
-- mq_leases (by id, last of all). Push never locks cursors, and pop takes no lock that it would have to wait for.

CREATE TABLE mq_queues (
  id                  int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name                text NOT NULL UNIQUE,
  namespace           text,
  task                text,
  lease_seconds       int NOT NULL DEFAULT 300 CHECK (lease_seconds > 0),
  retry_limit         int NOT NULL DEFAULT 3 CHECK (retry_limit >= 0),
  retry_delay_ms      int NOT NULL DEFAULT 1000 CHECK (retry_delay_ms >= 0),
  max_size            bigint NOT NULL DEFAULT 0 CHECK (max_size >= 0),           -- 0: no limit
  -- higher first, among queues that a pop names together
  priority            int NOT NULL DEFAULT 0,
  delay_seconds       int NOT NULL DEFAULT 0 CHECK (delay_seconds >= 0),
  window_seconds      int NOT NULL DEFAULT 0 CHECK (window_seconds >= 0),
  retention_seconds   int NOT NULL DEFAULT 0 CHECK (retention_seconds >= 0),     -- 0: for ever
  completed_retention_seconds int NOT NULL DEFAULT 0 CHECK (completed_retention_seconds >= 0),
  retention_enabled   boolean NOT NULL DEFAULT false,
  max_wait_seconds    int NOT NULL DEFAULT 0 CHECK (max_wait_seconds >= 0),      -- 0: for ever
  dead_letter_queue   boolean NOT NULL DEFAULT false,
  dlq_after_max_retries boolean NOT NULL DEFAULT false,
  encryption_enabled  boolean NOT NULL DEFAULT false,
  -- it holds no more than this; NULL: nobody knows. Counting costs a look at each partition
  size_most           bigint,
  created_at          timestamptz NOT NULL
);
CREATE INDEX mq_queues_namespace ON mq_queues (namespace, task);

CREATE TABLE mq_groups (
  id         int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  queue      int NOT NULL REFERENCES mq_queues ON DELETE CASCADE,
  name       text NOT NULL,
  mode       text NOT NULL,                  -- how it began: all, new, or from a time
  since      timestamptz NOT NULL,           -- what it begins behind, unless it began with all
  reached    uuid,                           -- joined: the partitions up to this one; NULL: all
  starts     timestamptz,                    -- the others begin with what came from this time on; NULL: with all
  created_at timestamptz NOT NULL,
  UNIQUE (queue, name)
);

CREATE TABLE mq_partitions (
  id         uuid PRIMARY KEY,               -- the lane's
  queue      int NOT NULL REFERENCES mq_queues ON DELETE CASCADE,
  name       text NOT NULL,
  tail       bigint NOT NULL,                -- the last message
  low        bigint NOT NULL DEFAULT 0,      -- the last one that is deleted, with all before it
  holes      bigint[] NOT NULL DEFAULT '{}', -- deleted singly, behind that: they take no room
  -- consumed by all groups at marked_at: deleted when that is long enough ago
  mark       bigint NOT NULL DEFAULT 0,
  marked_at  timestamptz,
  pushed_at  timestamptz NOT NULL,
  created_at timestamptz NOT NULL,
  CHECK (low <= tail)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
CREATE INDEX mq_partitions_queue ON mq_partitions (queue, name);
CREATE INDEX mq_partitions_in_turn ON mq_partitions (queue, id);

CREATE TABLE mq_messages (
  partition      uuid NOT NULL,
  seq            bigint NOT NULL,
  id             uuid NOT NULL,
  transaction_id text NOT NULL,
  trace_id       text,
  grp            int,                        -- replayed for this group alone
  sealed         boolean NOT NULL,           -- payload is AES-256-GCM, as base64
  payload        text NOT NULL,              -- JSON as it came; json would read it once more
  created_at     timestamptz NOT NULL,
  PRIMARY KEY (partition, seq)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
  autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_vacuum_cost_delay = 0);
CREATE UNIQUE INDEX mq_messages_once ON mq_messages (partition, transaction_id) WHERE grp IS NULL;
CREATE INDEX mq_messages_replayed ON mq_messages (partition, transaction_id) WHERE grp IS NOT NULL;

-- No foreign keys from here on: checking them would lock rows of the groups, which those who end groups lock first.
CREATE TABLE mq_cursors (
  partition  uuid NOT NULL,
  grp        int NOT NULL,
  head       bigint NOT NULL,                -- everything up to here is settled
  done       bigint[] NOT NULL DEFAULT '{}',
  lease      uuid,
  batch      bigint[] NOT NULL DEFAULT '{}',
  open       bigint[] NOT NULL DEFAULT '{}',
  tries      jsonb NOT NULL DEFAULT '{}',    -- by number
  careful    bigint NOT NULL DEFAULT 0,
  not_before timestamptz,
  consumed   bigint NOT NULL DEFAULT 0,
  moved_at   timestamptz,
  PRIMARY KEY (partition, grp),
  CHECK (cardinality(open) = 0 OR lease IS NOT NULL)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
CREATE INDEX mq_cursors_grp ON mq_cursors (grp);

CREATE TABLE mq_ready (
  partition uuid NOT NULL,
  grp       int NOT NULL,
  at        timestamptz NOT NULL,
  head      bigint,                          -- where the group begins, while it has no cursor
  PRIMARY KEY (partition, grp)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX mq_ready_order ON mq_ready (grp, at);

CREATE TABLE mq_leases (
  id         uuid PRIMARY KEY,
  grp        int NOT NULL,
  until      timestamptz NOT NULL,
  partitions uuid[] NOT NULL                 -- those that are still leased
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
  autovacuum_vacuum_cost_delay = 0);
CREATE INDEX mq_leases_due ON mq_leases (grp, until);

-- What a group gave up, whole: it outlives the log.
CREATE TABLE mq_dead (
  id             uuid PRIMARY KEY DEFAULT gen_random_uuid(),
  message_id     uuid NOT NULL,
  partition      uuid NOT NULL,
  seq            bigint NOT NULL,
  queue          text NOT NULL,
  partition_name text NOT NULL,
  namespace      text,
  task           text,
  grp            text NOT NULL,
  transaction_id text NOT NULL,
  trace_id       text,
  sealed         boolean NOT NULL,
  payload        text NOT NULL,
  error          text,
  retry_count    int NOT NULL,
  -- false: the queue has no dead letters, this is the record that it was skipped
  is_letter      boolean NOT NULL,
  created_at     timestamptz NOT NULL,
  moved_at       timestamptz NOT NULL
);
CREATE INDEX mq_dead_queue ON mq_dead (queue, moved_at DESC);
CREATE INDEX mq_dead_message ON mq_dead (partition, transaction_id);

CREATE TABLE mq_traces (
  id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  partition      uuid NOT NULL,
  transaction_id text NOT NULL,
  grp            text,
  event          text NOT NULL,
  names          text[] NOT NULL,
  data           text NOT NULL,
  worker         text,
  created_at     timestamptz NOT NULL
);
CREATE INDEX mq_traces_message ON mq_traces (partition, transaction_id);
