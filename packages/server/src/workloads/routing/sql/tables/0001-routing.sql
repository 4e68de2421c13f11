-- Routing: policies, blocks, and decisions.
--
-- rt_state is one row. A change of policies or blocks locks it first, so that the limits are exact and the numbers of
-- changes are in commit order: a process that has read all changes up to n misses none of them. Removed policies leave
-- no row; removals counts them, and the rest is found by comparing names.
--
-- A decision is written with its idempotency key in one transaction, after it was made and never before. Of several at
-- once with one key, the first to insert is kept; the others wait for its commit and find it.
--
-- Lock order: rt_state, policies or blocks. rt_keys (by key), rt_decisions (by request, tenant).

CREATE TABLE rt_state (
  one      boolean PRIMARY KEY DEFAULT true CHECK (one),
  change   bigint NOT NULL DEFAULT 0,        -- of policies: the last one
  removals bigint NOT NULL DEFAULT 0,        -- of policies
  policies int NOT NULL DEFAULT 0 CHECK (policies >= 0),
  blocks   int NOT NULL DEFAULT 0 CHECK (blocks >= 0)
) WITH (fillfactor = 50);
INSERT INTO rt_state DEFAULT VALUES;

CREATE TABLE rt_policies (
  tenant     text NOT NULL,                  -- empty: for every tenant
  id         text NOT NULL CHECK (id <> ''),
  body       json NOT NULL,
  version    int NOT NULL DEFAULT 1 CHECK (version > 0),
  change     bigint NOT NULL,
  updated_at timestamptz NOT NULL,
  PRIMARY KEY (tenant, id)
);
CREATE UNIQUE INDEX rt_policies_change ON rt_policies (change);

CREATE TABLE rt_blocks (
  type       text NOT NULL CHECK (type <> ''),
  version    text NOT NULL CHECK (version <> ''),
  body       json NOT NULL,
  created_at timestamptz NOT NULL,
  updated_at timestamptz NOT NULL,
  PRIMARY KEY (type, version)
);

CREATE TABLE rt_decisions (
  request    uuid NOT NULL,
  tenant     text NOT NULL,
  decision   json NOT NULL,
  trace_id   text NOT NULL,
  decided_at timestamptz NOT NULL,
  expires_at timestamptz NOT NULL,
  PRIMARY KEY (request, tenant)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);

-- Rows come and go in this order: inserts touch its last page only.
CREATE INDEX rt_decisions_expires ON rt_decisions (expires_at);

CREATE TABLE rt_keys (
  key        uuid PRIMARY KEY,               -- 128 bits of sha256(tenant, NUL, idempotency key), made by the caller
  task       uuid NOT NULL,                  -- of the task that it was used for, likewise
  decision   json NOT NULL,
  expires_at timestamptz NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);
CREATE INDEX rt_keys_expires ON rt_keys (expires_at);

CREATE TABLE rt_burials (
  ticket     uuid PRIMARY KEY,               -- of the operation whose message is among the broker's dead letters
  letter     text NOT NULL,
  error      text NOT NULL,
  is_read    boolean NOT NULL DEFAULT false, -- by an attempt of the ticket
  expires_at timestamptz NOT NULL
);
CREATE INDEX rt_burials_expires ON rt_burials (expires_at);
