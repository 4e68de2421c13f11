/** Made from the .sql files by scripts/generate-sql.mjs; not meant to be edited. */
export const coreSql = {
  name: 'core',
  tables: [
    {
      id: '0001-core',
      sql: `-- The queue: lanes, operations, leases, and what the gates count.
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
`,
    },
    {
      id: '0002-ledger',
      sql: `-- The ledger's rows and its head. Which rows may be written, and how they are chained: functions/ledger.sql.
--
-- No regular expressions in the CHECKs: three of them raised the cost of a row from 8 µs to 31 µs.

CREATE TABLE ledger (
  seq       bigint PRIMARY KEY CHECK (seq >= 1),
  at        timestamptz NOT NULL CHECK (isfinite(at) AND at = date_trunc('milliseconds', at)),
  type      text NOT NULL,
  actor     text NOT NULL,
  trace_id  text NOT NULL,
  payload   text NOT NULL,                   -- RFC 8785 form
  prev_hash text NOT NULL CHECK (octet_length(prev_hash) = 64),
  hash      text NOT NULL CHECK (octet_length(hash) = 64)
);

CREATE TABLE ledger_head (
  one  boolean PRIMARY KEY DEFAULT true CHECK (one),
  seq  bigint NOT NULL,
  hash text NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
INSERT INTO ledger_head (seq, hash) VALUES (0, repeat('0', 64));
`,
    },
    {
      id: '0003-streams',
      sql: `-- Streams: the output of operations while they run.
--
--   opened ──first record──► running ──record with an end──► ended ──retention──► expired (swept)
--
-- A record is one row: the chunks first..last. Two writers collide on (stream, first). Rows are never changed. They go
-- with their whole partition, which is why every row of a stream carries the time at which the stream was opened.

CREATE TABLE streams (
  id           uuid PRIMARY KEY,             -- the operation's
  identity     text NOT NULL,
  format       text NOT NULL CHECK (format IN ('openai', 'native')),
  thread_id    text NOT NULL,
  log          text NOT NULL CHECK (log IN ('postgres', 'redis')),
  -- callers know it in whole milliseconds
  born_at      timestamptz NOT NULL CHECK (born_at = date_trunc('milliseconds', born_at)),
  direct       boolean NOT NULL,             -- begun at once, where it was accepted; else it was queued
  watcher      uuid,                         -- the process whose client reads it
  unwatched_at timestamptz,                  -- since when nobody does
  ended        text CHECK (ended IN ('done', 'error', 'cancelled', 'unbegun')),
  ended_at     timestamptz,
  CHECK ((watcher IS NULL) = (unwatched_at IS NOT NULL)),
  CHECK ((ended IS NULL) = (ended_at IS NULL))
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX streams_born ON streams (born_at);
CREATE INDEX streams_ended ON streams (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX streams_open ON streams (born_at) WHERE ended_at IS NULL;

-- When a process looks next for streams that nobody will end. In real time, which no test moves.
CREATE TABLE stream_look (
  one     boolean PRIMARY KEY DEFAULT true CHECK (one),
  next_at timestamptz NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE stream_chunks (
  stream  uuid NOT NULL,
  born_at timestamptz NOT NULL,              -- of the stream
  first   int NOT NULL CHECK (first >= 1),
  last    int NOT NULL CHECK (last >= first),
  writer  text NOT NULL,
  chunks  text NOT NULL,                     -- with E'\\x1e' between them, which has no place in JSON
  ended   text CHECK (ended IN ('done', 'error', 'cancelled', 'unbegun')), -- its last chunk is the stream's end
  PRIMARY KEY (stream, first, born_at)
) PARTITION BY RANGE (born_at);

-- Catches what no partition covers, so that appending never fails for want of one.
CREATE TABLE stream_chunks_rest PARTITION OF stream_chunks DEFAULT;

CREATE TABLE stream_spans (
  name    text PRIMARY KEY,
  from_at timestamptz NOT NULL,
  to_at   timestamptz NOT NULL
);
`,
    },
    {
      id: '0004-rate-windows',
      sql: `-- Rates: buckets of any width instead of clock minutes.
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
`,
    },
    {
      id: '0005-parallel',
      sql: `-- Parallel operations: each is a lane of its own, whose id is the operation's. Such a lane holds one operation in its
-- life, and goes with it, in the same transaction: there is no empty one for the sweep to find.
ALTER TABLE lanes ADD COLUMN alone boolean NOT NULL DEFAULT false;
`,
    },
    {
      id: '0006-schedules',
      sql: `-- Recurring work: one row per schedule, by its name. See functions/schedules.sql.

CREATE TABLE schedules (
  name     text PRIMARY KEY,
  cron     text NOT NULL,
  timezone text NOT NULL,
  type     text NOT NULL,                    -- of its operations, for people who look
  next_at  timestamptz NOT NULL,             -- the first due time that was not handled; infinity: there is none
  last_at  timestamptz,                      -- the last due time that was handled
  seen_at  timestamptz NOT NULL              -- when a process that defines it was last seen
);
`,
    },
    {
      id: '0007-failures',
      sql: `-- The last error of an operation that failed: its code and status for the caller, its stack for operators. A row of its
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
`,
    },
    {
      id: '0008-progress',
      sql: `-- What running handlers say of their progress. Not logged: it is worth nothing after a crash, and is written often.
CREATE UNLOGGED TABLE progress (
  id       uuid PRIMARY KEY,
  attempt  int NOT NULL,                     -- it is shown while this attempt runs
  value    real NOT NULL CHECK (value BETWEEN 0 AND 1),
  note     text,
  at       timestamptz NOT NULL,
  sweep_at timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX progress_sweep ON progress (sweep_at);
`,
    },
    {
      id: '0009-turns',
      sql: `-- Turns: at most so many operations of one key run at a time, over all instances, and they start in order.
--
-- Each operation with a key is a lane of its own (0005-parallel.sql). Its lane holds a permit of the key while it is
-- ready or leased, and waits for one as a parked lane with the reason 'turn'. Whatever parks or removes a lane gives
-- its permit back and, in the same transaction, passes it on to the first one that waits (functions/turns.sql). A lane
-- keeps its turn for life: one that comes back from a retry, a delay or a pause waits again, before those accepted
-- later.
--
-- Invariant, audited by audit(): running is the number of the key's lanes that are ready or leased, lanes the number of
-- all its lanes, and none waits while running < most. Only a limit that was lowered leaves running above it.
--
-- Lock order: between lanes and ops, by key. Who holds the row may move the lanes that wait for a turn.
CREATE TABLE turns (
  key       uuid PRIMARY KEY,                -- of queue and partition, as a lane's id is
  queue     text NOT NULL,
  partition text NOT NULL,
  most      int NOT NULL CHECK (most >= 1),  -- as the last acceptance said
  running   int NOT NULL DEFAULT 0,
  lanes     bigint NOT NULL,
  CHECK (running BETWEEN 0 AND lanes)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);

-- A number that is taken in the accepting transaction: what was accepted before another was submitted is before it.
CREATE SEQUENCE turn_numbers;

ALTER TABLE lanes ADD COLUMN key uuid, ADD COLUMN turn bigint;

ALTER TABLE parked ADD COLUMN key uuid, ADD COLUMN turn bigint,
  DROP CONSTRAINT parked_reason_check,
  ADD CONSTRAINT parked_reason_check CHECK (reason IN ('delay', 'retry', 'pause', 'turn'));
CREATE INDEX parked_turn ON parked (key, turn) WHERE reason = 'turn';

-- For redriving, when nothing of the key may be left.
ALTER TABLE dead_letters ADD COLUMN key uuid, ADD COLUMN most int;
`,
    },
    {
      id: '0010-expiry',
      sql: `-- Operations that may not start after a time.
--
-- Who claims one too late ends it without running it; what nobody claims (paused, waiting for its turn or for a retry)
-- is ended by a task of every heartbeat, which finds it by the index. It becomes history, with the code: there is no
-- dead letter, because running it again would be too late again.
ALTER TABLE ops ADD COLUMN expires_at timestamptz;
CREATE INDEX ops_expires ON ops (expires_at) WHERE expires_at IS NOT NULL;

-- NOT VALID: no old row can violate it, and the table need not be read.
ALTER TABLE history ADD COLUMN code text, DROP CONSTRAINT IF EXISTS history_status_check;
ALTER TABLE history ADD CONSTRAINT history_status_check
  CHECK (status IN ('completed', 'cancelled', 'failed')) NOT VALID;
`,
    },
  ],
  functions: [
    {
      name: 'accept',
      sql: `-- accept_flush: one call per flush. Decides idempotency, halt, capacity and rate per item, and writes what is accepted,
-- in one transaction. The steps are in the files of what they decide, and run in the lock order
-- (tables/0001-core.sql).
--
-- Items come grouped by lane, and each lane once, sorted by id. Verdicts: queue, execute, apply; replay (the stored
-- answer is returned), mismatch (key used for another body), in_progress (the first request of the key is not answered
-- yet); capacity_full, rate_limited, halted, and depth_full (nothing more may wait). Between the steps NULL is an item
-- that is not decided yet, and a NULL list means that no item is.
--
-- Reasons given with the items: '' may run now and answers with its result; '+requested' and '+still_running' may run
-- now and answer with a ticket; all others are queued.
--
-- If nothing is scarce, every step is one set-based statement. Only a flush that does not fit is rationed item by item.
-- Items of an empty lane that may be applied now move head with tail and leave no operation; the caller writes their
-- effect in the same transaction.
--
-- The steps have no settings of their own: they run with those of accept. Setting them for each step costs more than
-- calling it. Counting the items per lane here, instead of in the caller, made a flush of 64 cost 8% more (per rate
-- key: 3%), so p_counts, p_may_run, p_rn and p_rate_asked are passed for the case that nothing is refused. A step is
-- called as an expression (r := step(…)), not in a FROM clause, which costs 10 µs more.
CREATE OR REPLACE FUNCTION accept_flush(
  p_worker uuid, p_part smallint, p_apply boolean,
  -- Each lane once, by id, and what each item brings; p_lane is the number of its lane, p_rn its number in the lane.
  p_lanes uuid[], p_queues text[], p_partitions text[], p_counts bigint[], p_may_run boolean[],
  p_lane int[], p_rn bigint[], p_id uuid[], p_type text[], p_priority smallint[], p_stamp bigint[], p_lead bigint[],
  p_identity text[], p_payload text[], p_delay_ms bigint[], p_max_attempts int[], p_timeout_ms int[], p_trace text[],
  p_reason text[], p_pace_ms real[], p_backlog_ms bigint,
  -- Empty lists: no item has one.
  p_keys uuid[], p_requests uuid[], p_key_ttl_ms bigint, p_gates text[], p_halts text[],
  -- Each rate key once, in order (p_rate_minutes: its window, rates.sql); per tier the number of its key, and of its
  -- item. No items: one tier each.
  p_rate_key uuid[], p_rate_asked int[], p_rate_limit int[], p_rate_minutes int[], p_rate_keep int[],
  p_rate_ix int[], p_rate_item int[],
  -- Nothing more may wait; which items are one request.
  p_full boolean, p_batch int[],
  -- Per lane: is it a parallel operation's, what key has it, and how many of that may run. How many wait for slots.
  p_alone boolean[], p_turn_keys uuid[], p_turn_most int[], p_ahead bigint, p_expires_ms bigint[],
  -- One row of arrays, an element per item: parsing rows costs the caller more than the rest together.
  OUT verdicts text[], OUT fence bigint, OUT seqs bigint[], OUT places bigint[], OUT waits_ms bigint[],
  OUT reasons text[], OUT stamps bigint[], OUT answers json[], OUT ops uuid[],
  OUT tiers int[], OUT rates_left bigint[], OUT rates_reset_ms bigint[], OUT at_ms bigint
)
  LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET jit = off AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock(); v_decided text[];
  v_lanes uuid[] := p_lanes; v_queues text[] := p_queues; v_partitions text[] := p_partitions;
  v_counts bigint[] := p_counts; v_may_run boolean[] := p_may_run; v_lane int[] := p_lane; v_rn bigint[] := p_rn;
  v_alone boolean[] := p_alone; v_turn_keys uuid[] := p_turn_keys; v_turn_most int[] := p_turn_most;
  v_may_lease boolean := false; v_paused boolean; v_parked boolean[]; v_behind bigint[];
  k record; n record; l record; d record; w record;
BEGIN
  -- Its row stays until we commit, so that a process that may hold leases keeps that right.
  IF NOT p_apply AND p_reason && '{"",+requested,+still_running}' THEN
    PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
    v_may_lease := FOUND;
  END IF;
  IF p_full OR cardinality(p_keys) + cardinality(p_halts) + cardinality(p_gates) + cardinality(p_rate_key) > 0 THEN
    k := accept_decide(p_lanes, p_queues, p_partitions, p_lane, p_id, p_type, p_reason, p_keys, p_requests,
      p_key_ttl_ms, p_gates, p_halts, p_rate_key, p_rate_asked, p_rate_limit, p_rate_minutes, p_rate_keep, p_rate_ix,
      p_rate_item, p_full, p_batch, t);
    v_decided := k.verdicts; answers := k.answers; ops := k.ops;
    tiers := k.tiers; rates_left := k.rates_left; rates_reset_ms := k.rates_reset_ms; at_ms := k.at_ms;
  END IF;
  IF v_decided IS NOT NULL THEN
    n := lanes_count(p_lanes, p_queues, p_partitions, p_lane, p_reason, v_decided);
    v_lanes := n.ids; v_queues := n.queues; v_partitions := n.partitions; v_counts := n.counts; v_may_run := n.may_run;
    v_lane := n.lane; v_rn := n.rn; w := lanes_pick(p_lanes, v_lanes, p_alone, p_turn_keys, p_turn_most);
    v_alone := w.alone; v_turn_keys := w.keys; v_turn_most := w.most;
  END IF;
  v_paused := EXISTS (SELECT FROM pauses);
  IF NOT v_may_lease AND NOT p_apply THEN v_may_run := array_fill(false, ARRAY[coalesce(cardinality(v_lanes), 0)]);
  ELSIF v_paused THEN v_may_run := pauses_check(v_queues, v_partitions, v_may_run, v_lane, v_rn, p_type);
  END IF;
  IF cardinality(v_alone) > 0 THEN
    l := lanes_take(v_lanes, v_queues, v_partitions, v_counts, v_may_run, v_alone, v_turn_keys, p_apply, t);
  ELSE l := lanes_append(v_lanes, v_queues, v_partitions, v_counts, v_may_run, p_apply, t);
  END IF;
  IF cardinality(v_turn_keys) > 0 THEN
    w := turns_take(v_lanes, v_queues, v_partitions, v_turn_keys, v_turn_most, v_lane, p_delay_ms, l.running, t);
    v_parked := w.waits; v_behind := w.ahead; l.running := w.running;
  END IF;
  d := verdicts_decide(p_apply, v_may_lease, v_paused, p_backlog_ms, v_lane, v_rn, p_priority, p_stamp, p_lead,
    p_delay_ms, p_reason, p_pace_ms, v_decided, v_counts, l.tails, l.depths, l.running, l.paces, l.blocked);
  verdicts := d.verdicts; seqs := d.seqs; waits_ms := d.waits_ms; reasons := d.reasons; stamps := d.stamps;
  places := d.places;
  IF true = ANY (v_alone) AND (p_ahead > 0 OR v_parked IS NOT NULL) THEN
    w := places_alone(v_lane, v_alone, p_ahead, v_parked, v_behind, v_turn_most, p_pace_ms, p_delay_ms, places,
      waits_ms, reasons);
    places := w.places; waits_ms := w.waits_ms; reasons := w.reasons;
  END IF;

  INSERT INTO ops (lane, seq, id, type, priority, stamp, identity, payload, accepted_at, not_before, started_at,
      max_attempts, timeout_ms, trace, idem, gate, expires_at)
    SELECT v_lanes[u.lane], u.seq, u.id, u.type, u.priority, u.stamp, u.identity, u.payload::json, t,
      CASE WHEN u.delay_ms > 0 THEN t + u.delay_ms * interval '1 ms' END, CASE WHEN u.verdict = 'execute' THEN t END,
      u.max_attempts, u.timeout_ms, u.trace, u.key, u.gate, t + u.expires_ms * interval '1 ms'
    FROM unnest(v_lane, verdicts, seqs, stamps, p_id, p_type, p_priority, p_identity, p_payload, p_delay_ms,
        p_max_attempts, p_timeout_ms, p_trace, p_keys, p_gates, p_expires_ms)
      u(lane, verdict, seq, stamp, id, type, priority, identity, payload, delay_ms, max_attempts, timeout_ms, trace,
        key, gate, expires_ms) WHERE u.verdict IN ('queue', 'execute');
  IF d.starts_lanes THEN
    PERFORM lanes_start(v_lanes, v_queues, v_partitions, v_counts, l.depths, v_lane, v_rn, verdicts, p_priority, stamps,
      p_delay_ms, p_type, seqs, v_parked, t);
  END IF;
  IF true = ANY (v_parked) THEN PERFORM turns_next(v_turn_keys); END IF; -- if the limit of a key was raised
  IF 'execute' = ANY (verdicts) THEN fence := lease_take(p_worker, v_lanes, v_lane, verdicts, seqs, t); END IF;
  IF cardinality(p_keys) > 0 THEN PERFORM idempotency_answer(p_keys, verdicts, places, waits_ms, reasons); END IF;
  PERFORM tally_accepted(p_worker, p_part, p_type, verdicts, d.accepted);
END $$;

-- A step of accept_flush: idempotency, halts, depth and the gates that count, in the lock order. verdicts: NULL is not
-- decided yet, and a NULL list means that no item is.
CREATE OR REPLACE FUNCTION accept_decide(
  p_lanes uuid[], p_queues text[], p_partitions text[], p_lane int[], p_id uuid[], p_type text[], p_reason text[],
  p_keys uuid[], p_requests uuid[], p_key_ttl_ms bigint, p_gates text[], p_halts text[],
  p_rate_key uuid[], p_rate_asked int[], p_rate_limit int[], p_rate_minutes int[], p_rate_keep int[],
  p_rate_ix int[], p_rate_item int[], p_full boolean, p_batch int[], p_at timestamptz,
  OUT verdicts text[], OUT answers json[], OUT ops uuid[],
  OUT tiers int[], OUT rates_left bigint[], OUT rates_reset_ms bigint[], OUT at_ms bigint
)
  LANGUAGE plpgsql AS $$
DECLARE
  k record; g record;
BEGIN
  IF cardinality(p_keys) > 0 THEN
    k := idempotency_take(p_keys, p_requests, p_id, p_batch, p_at, p_key_ttl_ms);
    verdicts := k.verdicts; answers := k.answers; ops := k.ops;
  END IF;
  IF cardinality(p_halts) > 0 THEN verdicts := halts_check(p_halts, verdicts); END IF;
  IF p_full THEN
    verdicts := depth_check(p_batch, p_lane, p_reason, verdicts, p_lanes, p_queues, p_partitions, p_type[1]);
  END IF;
  IF cardinality(p_gates) > 0 OR cardinality(p_rate_key) > 0 THEN
    g := gates_take(p_gates, p_rate_key, p_rate_asked, p_rate_limit, p_rate_minutes, p_rate_keep, p_rate_ix,
      p_rate_item, verdicts, cardinality(p_id), p_at);
    verdicts := g.verdicts;
    tiers := g.tiers; rates_left := g.rates_left; rates_reset_ms := g.rates_reset_ms; at_ms := g.at_ms;
  END IF;
  IF verdicts IS NOT NULL AND cardinality(p_keys) > 0 THEN PERFORM idempotency_release(p_keys, verdicts); END IF;
END $$;

-- The same for release 0.2.0, which knows no parallel operations, keys and expiry.
CREATE OR REPLACE FUNCTION accept(
  p_worker uuid, p_part smallint, p_apply boolean,
  p_lanes uuid[], p_queues text[], p_partitions text[], p_counts bigint[], p_may_run boolean[],
  p_lane int[], p_rn bigint[], p_id uuid[], p_type text[], p_priority smallint[], p_stamp bigint[], p_lead bigint[],
  p_identity text[], p_payload text[], p_delay_ms bigint[], p_max_attempts int[], p_timeout_ms int[], p_trace text[],
  p_reason text[], p_pace_ms real[], p_backlog_ms bigint,
  p_keys uuid[], p_requests uuid[], p_key_ttl_ms bigint, p_gates text[], p_halts text[],
  p_rate_key uuid[], p_rate_asked int[], p_rate_limit int[], p_rate_minutes int[], p_rate_keep int[],
  p_rate_ix int[], p_rate_item int[], p_full boolean, p_batch int[],
  OUT verdicts text[], OUT fence bigint, OUT seqs bigint[], OUT places bigint[], OUT waits_ms bigint[],
  OUT reasons text[], OUT stamps bigint[], OUT answers json[], OUT ops uuid[],
  OUT tiers int[], OUT rates_left bigint[], OUT rates_reset_ms bigint[], OUT at_ms bigint
)
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT * FROM accept_flush(p_worker, p_part, p_apply, p_lanes, p_queues, p_partitions, p_counts, p_may_run, p_lane,
    p_rn, p_id, p_type, p_priority, p_stamp, p_lead, p_identity, p_payload, p_delay_ms, p_max_attempts, p_timeout_ms,
    p_trace, p_reason, p_pace_ms, p_backlog_ms, p_keys, p_requests, p_key_ttl_ms, p_gates, p_halts, p_rate_key,
    p_rate_asked, p_rate_limit, p_rate_minutes, p_rate_keep, p_rate_ix, p_rate_item, p_full, p_batch, '{}', '{}',
    '{}', 0, '{}')
$$;
`,
    },
    {
      name: 'admit',
      sql: `-- admit: the gates that count (halt and rate) without an operation. One call per flush, in its own transaction: the
-- same steps as in accept, in the same lock order, so a rate is exact whether an operation or an admission takes it.
--
-- Verdicts: halted, rate_limited; NULL is admitted. Returned as in accept: one row of arrays, an element per item.
CREATE OR REPLACE FUNCTION admit(
  p_items int,
  -- Empty: no item has one.
  p_halts text[],
  -- As in accept.
  p_rate_key uuid[], p_rate_asked int[], p_rate_limit int[], p_rate_minutes int[], p_rate_keep int[],
  p_rate_ix int[], p_rate_item int[],
  OUT verdicts text[], OUT tiers int[], OUT rates_left bigint[], OUT rates_reset_ms bigint[], OUT at_ms bigint
)
  LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
  g record;
BEGIN
  IF cardinality(p_halts) > 0 THEN verdicts := halts_check(p_halts, NULL); END IF;
  IF cardinality(p_rate_key) = 0 THEN RETURN; END IF;
  g := gates_take('{}', p_rate_key, p_rate_asked, p_rate_limit, p_rate_minutes, p_rate_keep, p_rate_ix, p_rate_item,
    verdicts, p_items, clock());
  verdicts := g.verdicts;
  tiers := g.tiers; rates_left := g.rates_left; rates_reset_ms := g.rates_reset_ms; at_ms := g.at_ms;
END $$;
`,
    },
    {
      name: 'audit',
      sql: `-- Checks everything that must hold between transactions. Returns no row if all of it does.

-- Everything that must hold between transactions; no row when it does.
CREATE OR REPLACE FUNCTION audit() RETURNS TABLE (fault text)
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  WITH places AS (
    SELECT lane FROM ready UNION ALL SELECT lane FROM parked UNION ALL SELECT unnest(lanes) FROM leases
  ), counted AS (
    SELECT l.id, l.head, l.tail, l.depth, coalesce(p.n, 0) AS places, coalesce(o.n, 0) AS ops, o.first, o.last
    FROM lanes l
    LEFT JOIN (SELECT lane, count(*) AS n FROM places GROUP BY lane) p ON p.lane = l.id
    LEFT JOIN (SELECT lane, count(*) AS n, min(seq) AS first, max(seq) AS last FROM ops
        GROUP BY lane) o ON o.lane = l.id
  )
  SELECT format('lane %s has %s operations but says %s', id, ops, depth) FROM counted WHERE ops <> depth
  UNION ALL SELECT format('lane %s with %s operations is in %s places', id, ops, places) FROM counted
    WHERE (ops > 0) <> (places = 1) AND NOT (ops = 0 AND places = 0)
  UNION ALL SELECT format('lane %s has sequences %s..%s outside %s..%s', id, first, last, head, tail) FROM counted
    WHERE first <= head OR last > tail
  UNION ALL SELECT format('lane %s of a parallel operation is empty, or has another one', l.id) FROM lanes l
    WHERE l.alone AND NOT EXISTS (SELECT FROM ops o WHERE o.lane = l.id AND o.id = l.id)
  UNION ALL SELECT format('operation %s has no lane', o.id) FROM ops o
    WHERE NOT EXISTS (SELECT FROM lanes l WHERE l.id = o.lane)
  UNION ALL SELECT format('lane %s waits without being known', p.lane) FROM places p
    WHERE NOT EXISTS (SELECT FROM lanes l WHERE l.id = p.lane)
  UNION ALL SELECT format('lane %s is ready with a stamp that is not its head''s', r.lane) FROM ready r
    WHERE NOT EXISTS (
    SELECT FROM lanes l,
      LATERAL (SELECT x.priority, x.stamp FROM ops x WHERE x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1) o
    WHERE l.id = r.lane AND o.priority = r.priority AND o.stamp = r.stamp)
  UNION ALL SELECT format('lane %s is ready with another name, or a head or caution that would pass an operation by',
      r.lane) FROM ready r JOIN lanes l ON l.id = r.lane
    WHERE r.queue <> l.queue OR r.partition <> l.partition OR EXISTS (SELECT FROM ops o
        WHERE o.lane = l.id AND (o.seq <= r.head OR o.seq <= l.careful AND NOT r.careful))
  UNION ALL SELECT format('lane %s is ready under %s, which is not its head''s type, or nobody''s label', r.lane,
      r.type) FROM ready r
    WHERE (strpos(r.type, ' ') > 0 AND NOT EXISTS (SELECT FROM workers w WHERE w.announced ? r.type))
      OR split_part(r.type, ' ', 1) IS DISTINCT FROM (SELECT o.type FROM lanes l, ops o
          WHERE l.id = r.lane AND o.lane = l.id AND o.seq > l.head ORDER BY o.seq LIMIT 1)
  UNION ALL SELECT format('lease %s belongs to nobody', l.fence) FROM leases l
    WHERE NOT EXISTS (SELECT FROM workers w WHERE w.id = l.worker)
  UNION ALL SELECT format('type %s: %s operations, %s tallied', coalesce(o.type, t.type), coalesce(o.n, 0),
      coalesce(t.n, 0))
    FROM (SELECT type, count(*) AS n FROM ops GROUP BY type) o
    FULL JOIN (SELECT type, sum(n) AS n FROM tallies WHERE type <> '!dead' GROUP BY type) t USING (type)
    WHERE coalesce(o.n, 0) <> coalesce(t.n, 0)
  UNION ALL SELECT format('%s dead letters, %s tallied', d.n, t.n)
    FROM (SELECT count(*) AS n FROM dead_letters) d, (SELECT coalesce(sum(n), 0) AS n FROM tallies
        WHERE type = '!dead') t WHERE d.n <> t.n
  UNION ALL SELECT x.fault FROM turns_audit() x
$$;
`,
    },
    {
      name: 'cancel',
      sql: `-- Takes a pending operation out of its lane, because it was cancelled or has expired, or asks a running one to stop.

-- Takes a pending operation out of its lane. 'asked' when it runs and its handler can stop, 'running' when it cannot,
-- 'gone' when it is not in the queue. With a code it has failed with that, and only if
-- it has expired. Who holds the lane's ready or parked row, or sees its lease, knows where it is.
CREATE OR REPLACE FUNCTION withdraw(p_id uuid, p_abortable text[], p_why text, p_code text) RETURNS text
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  o record; f record;
  v_at tid; v_upto bigint; v_where text; v_depth bigint; v_key uuid;
BEGIN
  PERFORM pause_guard();
  SELECT x.lane, x.seq, x.type, x.idem, x.gate INTO o FROM ops x WHERE x.id = p_id;
  IF NOT FOUND THEN RETURN 'gone'; END IF;
  PERFORM FROM idempotency d WHERE d.key = o.idem FOR UPDATE;
  PERFORM FROM gates g WHERE g.name = o.gate FOR UPDATE;
  SELECT l.key INTO v_key FROM lanes l WHERE l.id = o.lane FOR UPDATE;
  IF v_key IS NOT NULL THEN PERFORM FROM turns k WHERE k.key = v_key FOR UPDATE; END IF;
  SELECT x.seq INTO o.seq FROM ops x WHERE x.id = p_id AND (p_code IS NULL OR x.expires_at <= t) FOR UPDATE;
  IF NOT FOUND THEN RETURN 'gone'; END IF;
  FOR i IN 1 .. 20 LOOP
    SELECT x.seq, x.priority, x.stamp INTO f FROM lanes l, ops x
      WHERE l.id = o.lane AND x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1;
    SELECT x.ctid INTO v_at FROM ready x
      WHERE x.priority = f.priority AND x.stamp = f.stamp AND x.lane = o.lane FOR UPDATE;
    IF FOUND THEN v_where := 'ready'; EXIT; END IF;
    PERFORM FROM parked x WHERE x.lane = o.lane FOR UPDATE;
    IF FOUND THEN v_where := 'parked'; EXIT; END IF;
    SELECT z.upto INTO v_upto FROM leases l, unnest(l.lanes, l.uptos) z(lane, upto) WHERE z.lane = o.lane;
    IF FOUND THEN v_where := 'leased'; EXIT; END IF;
    -- It was on its way from parked to ready: look again.
  END LOOP;
  IF v_where IS NULL THEN
    RAISE EXCEPTION 'lane % has operations but is nowhere', o.lane USING ERRCODE = 'XX000';
  END IF;
  IF v_where = 'leased' AND o.seq <= v_upto THEN
    IF NOT o.type = ANY (p_abortable) THEN RETURN 'running'; END IF;
    INSERT INTO cancels (id, asked_at) VALUES (p_id, t) ON CONFLICT DO NOTHING;
    RETURN 'asked';
  END IF;
  WITH gone AS (DELETE FROM ops x WHERE x.lane = o.lane AND x.seq = o.seq RETURNING x.*)
  INSERT INTO history (id, finished_at, status, type, queue, partition, priority, identity, accepted_at, attempts,
      max_attempts, error, trace, code)
    SELECT g.id, t, CASE WHEN p_code IS NULL THEN 'cancelled' ELSE 'failed' END, g.type, l.queue, l.partition,
      g.priority, g.identity, g.accepted_at, g.attempts, g.max_attempts, p_why, g.trace, p_code
    FROM gone g JOIN lanes l ON l.id = g.lane;
  UPDATE lanes l
    SET depth = l.depth - 1, head = CASE WHEN f.seq = o.seq AND v_where <> 'leased' THEN o.seq ELSE l.head END
    WHERE l.id = o.lane RETURNING l.depth INTO v_depth;
  IF v_where <> 'leased' AND f.seq = o.seq THEN
    DELETE FROM ready x WHERE x.ctid = v_at AND v_where = 'ready';
    DELETE FROM parked x WHERE x.lane = o.lane AND v_where = 'parked';
    IF v_depth > 0 THEN PERFORM lane_requeue(o.lane); ELSE PERFORM lanes_drop(ARRAY[o.lane]); END IF;
    IF v_key IS NOT NULL THEN
      UPDATE turns k SET running = k.running - (v_where = 'ready')::int, lanes = k.lanes - 1 WHERE k.key = v_key;
      PERFORM turns_next(ARRAY[v_key]);
    END IF;
  END IF;
  IF o.idem IS NOT NULL THEN
    UPDATE idempotency d SET answer = CASE WHEN p_code IS NULL THEN json_build_object('v', 'cancelled')
        ELSE json_build_object('v', 'failed', 'error', p_why, 'code', p_code, 'status', 504) END
      WHERE d.key = o.idem AND d.op = p_id AND d.answer IS NULL;
  END IF;
  IF o.gate IS NOT NULL THEN PERFORM gates_release(ARRAY[o.gate], ARRAY[1::bigint]); END IF;
  PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, o.type, -1);
  RETURN 'cancelled';
END $$;

CREATE OR REPLACE FUNCTION cancel(p_id uuid, p_abortable text[], p_why text) RETURNS text
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT withdraw(p_id, p_abortable, p_why, NULL)
$$;

-- Up to p_most operations that wait although their time is over, oldest first.
CREATE OR REPLACE FUNCTION expired(p_most int) RETURNS TABLE (id uuid, type text)
  LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT o.id, o.type FROM ops o WHERE o.expires_at <= clock() AND o.started_at IS NULL ORDER BY o.expires_at
  LIMIT p_most
$$;
`,
    },
    {
      name: 'capacity',
      sql: `-- Capacity gates: how many are held, and the hysteresis between full_at and resume_below.
--
-- capacity_take and capacity_hold are called by gates_take and run with the settings of accept.

-- Locks the gates of a flush, in name order. left_now: how many more each may hold; asked: how many want one.
CREATE OR REPLACE FUNCTION capacity_take(
  p_gates text[], p_decided text[],
  OUT names text[], OUT left_now bigint[], OUT asked bigint[], OUT is_tight boolean
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  SELECT array_agg(g.name ORDER BY g.name),
      array_agg(CASE WHEN g.overflowing THEN 0 ELSE g.full_at - g.held END ORDER BY g.name),
      array_agg(g.asked ORDER BY g.name), bool_or(g.overflowing OR g.held + g.asked > g.full_at)
    INTO names, left_now, asked, is_tight
    FROM (
      SELECT x.name, x.held, x.full_at, x.overflowing, (
          SELECT count(*) FROM unnest(p_gates, p_decided) u(name, decided) WHERE u.name = x.name AND u.decided IS NULL
        ) AS asked
      FROM gates x WHERE x.name = ANY (p_gates) ORDER BY x.name FOR UPDATE
    ) g;
  IF coalesce(cardinality(names), 0)
      <> (SELECT count(DISTINCT u.name) FROM unnest(p_gates) u(name) WHERE u.name IS NOT NULL) THEN
    RAISE EXCEPTION 'a capacity gate is not registered' USING ERRCODE = 'XX000';
  END IF;
END $$;

-- Writes what the gates gave.
CREATE OR REPLACE FUNCTION capacity_hold(p_names text[], p_gave bigint[], p_at timestamptz) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE gates x SET held = x.held + u.gave, overflowing = x.overflowing OR x.held + u.gave >= x.full_at,
      changed_at = CASE WHEN NOT x.overflowing AND x.held + u.gave >= x.full_at THEN p_at ELSE x.changed_at END
    FROM unnest(p_names, p_gave) u(name, gave) WHERE x.name = u.name AND u.gave > 0;
END $$;

CREATE OR REPLACE FUNCTION gate_register(p_name text, p_full_at bigint, p_resume_below bigint) RETURNS void
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  INSERT INTO gates AS g (name, full_at, resume_below, changed_at) VALUES (p_name, p_full_at, p_resume_below, clock())
  ON CONFLICT (name) DO UPDATE SET full_at = excluded.full_at, resume_below = excluded.resume_below,
    overflowing = g.held >= excluded.full_at OR (g.overflowing AND g.held >= excluded.resume_below)
  WHERE (g.full_at, g.resume_below) IS DISTINCT FROM (excluded.full_at, excluded.resume_below)
$$;

CREATE OR REPLACE FUNCTION gates_release(p_names text[], p_counts bigint[]) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  r record;
BEGIN
  FOR r IN SELECT u.name, u.n FROM unnest(p_names, p_counts) u(name, n) ORDER BY u.name LOOP
    UPDATE gates x SET held = greatest(0, x.held - r.n),
      overflowing = x.overflowing AND x.held - r.n >= x.resume_below,
      changed_at = CASE WHEN x.overflowing AND x.held - r.n < x.resume_below THEN clock() ELSE x.changed_at END
    WHERE x.name = r.name;
  END LOOP;
END $$;
`,
    },
    {
      name: 'claim',
      sql: `-- Claims ready lanes for a process, under a lease with a new fence.
--
-- Plans: as in settle.sql, hash joins and sequential scans are off.

-- Lanes whose time has come.
CREATE OR REPLACE FUNCTION promote(p_most int) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_hashjoin = off SET enable_mergejoin = off
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_n int;
BEGIN
  IF NOT EXISTS (SELECT FROM parked p WHERE p.until <= t) THEN RETURN 0; END IF;
  WITH due AS (
    SELECT p.lane FROM parked p WHERE p.until <= t AND p.key IS NULL ORDER BY p.until LIMIT p_most
      FOR UPDATE SKIP LOCKED
  ), heads AS (
    SELECT d.lane, o.priority, o.stamp, o.type, l.head, l.depth, l.careful > l.head AS careful, l.queue, l.partition
      FROM due d JOIN lanes l ON l.id = d.lane,
      LATERAL (SELECT x.priority, x.stamp, x.type FROM ops x WHERE x.lane = l.id AND x.seq > l.head ORDER BY x.seq
          LIMIT 1) o
  ), gone AS (
    DELETE FROM parked p USING heads h WHERE p.lane = h.lane RETURNING p.lane
  ), readied AS (
    INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
      SELECT h.lane, h.priority, h.stamp, h.type, h.head, h.depth, h.careful, h.queue, h.partition
        FROM heads h JOIN gone g ON g.lane = h.lane RETURNING 1
  )
  SELECT count(*) INTO v_n FROM readied;
  IF EXISTS (SELECT FROM turns) THEN v_n := v_n + turns_promote(p_most, t); END IF;
  RETURN v_n;
END $$;

-- Of these types those that have a ready lane; NULL: none has. Of all types (NULL): an empty list, if there is any
-- lane.
CREATE OR REPLACE FUNCTION ready_types(p_types text[]) RETURNS text[]
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off
  SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
  IF p_types IS NULL THEN RETURN CASE WHEN EXISTS (SELECT FROM ready x) THEN '{}'::text[] END; END IF;
  RETURN (SELECT array_agg(u.type) FROM unnest(p_types) u(type)
      WHERE EXISTS (SELECT FROM ready x WHERE x.type = u.type));
END $$;

-- Leases up to p_want ready lanes and hands out the first operations of each, in order. p_types: only lanes whose
-- first operation is of these; NULL: all. p_together: types that are settled in one transaction each time, so that
-- p_each does not bound them.
-- p_trusted: types that cannot end their process, and need not come one at a time. One row, with a list for each
-- column (a row for each operation costs both sides more than finding it): of lanes, then of operations, which name
-- their lane by number; \`depth\` is what the lanes held together when they became ready. Lists are texts with commas;
-- what may hold a comma is a JSON array. expire_ms: by id, until it may not start any more, for those that may
-- expire; the caller ends those without running them.
CREATE OR REPLACE FUNCTION claim_ready(
  p_worker uuid, p_want int, p_budget int, p_each int, p_turn smallint, p_types text[], p_together text[],
  p_trusted text[],
  OUT fence bigint, OUT depth bigint, OUT lanes text, OUT queues json, OUT partitions json, OUT careful text,
  OUT ixs text, OUT seqs text, OUT ids text, OUT types text, OUT priorities text, OUT identities json,
  OUT payloads text, OUT waited_ms text, OUT due text, OUT attempts text, OUT max_attempts text,
  OUT timeouts_ms text, OUT traces json, OUT idems text, OUT gates json, OUT expire_ms text
)
  LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_hashjoin = off SET enable_mergejoin = off
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_lanes uuid[]; v_heads bigint[]; v_careful boolean[]; v_queues text[]; v_partitions text[]; v_held boolean[];
  v_stamps bigint[];
  v_own text[]; v_at tid[]; v_stamp bigint; v_most int; v_types text[]; v_ixs int[]; v_seqs bigint[];
  v_identities text[]; v_traces text[]; v_gates text[]; v_gated boolean;
BEGIN
  -- The lock below is a write, and a write makes the commit wait for the disk: not for finding nothing.
  v_own := ready_types(p_types);
  IF v_own IS NULL AND NOT EXISTS (SELECT FROM parked p WHERE p.until <= t) THEN RETURN; END IF;
  PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
  IF NOT FOUND THEN RETURN; END IF;
  IF promote(p_want) > 0 THEN v_own := ready_types(p_types); END IF;
  IF v_own IS NULL THEN RETURN; END IF;
  -- Strict priority, but p_turn lets a lower level go first now and then, so that no level starves.
  FOR v_turn IN REVERSE p_turn .. 1 BY greatest(1, p_turn - 1) LOOP
    -- Of one type by its own index: 10,000 lanes that others are to run would be passed by one by one, for 4 ms each
    -- time.
    v_at := CASE WHEN cardinality(v_own) = 1 THEN ARRAY(
        SELECT x.ctid FROM ready x WHERE x.type = v_own[1] AND x.priority + 0 >= v_turn
          ORDER BY x.priority + 0, x.stamp LIMIT p_want FOR UPDATE SKIP LOCKED)
      ELSE ARRAY(
        SELECT x.ctid FROM ready x WHERE x.priority >= v_turn AND (p_types IS NULL OR x.type = ANY (p_types))
          ORDER BY x.priority, x.stamp LIMIT p_want FOR UPDATE SKIP LOCKED)
      END;
    WITH d AS (
      DELETE FROM ready x USING unnest(v_at) c(at) WHERE x.ctid = c.at
        RETURNING x.lane, x.stamp, x.type, x.head, x.depth, x.careful, x.queue, x.partition
    )
    SELECT array_agg(d.lane), array_agg(d.stamp), max(d.stamp), array_agg(d.type), array_agg(d.head), sum(d.depth),
      array_agg(d.careful), array_agg(d.queue), array_agg(d.partition)
      INTO v_lanes, v_stamps, v_stamp, v_types, v_heads, depth, v_careful, v_queues, v_partitions FROM d;
    EXIT WHEN v_lanes IS NOT NULL;
  END LOOP;
  IF v_lanes IS NULL THEN RETURN; END IF;
  IF EXISTS (SELECT FROM pauses) THEN
    -- They are claimed to be parked by the settlement. Virtual time goes by what is served: these must not move it.
    SELECT array_agg(x.held), max(x.stamp) FILTER (WHERE NOT x.held) INTO v_held, v_stamp FROM (
      SELECT u.stamp, EXISTS (SELECT FROM pauses p
          WHERE CASE WHEN p.queue = '' THEN p.partition = split_part(u.type, ' ', 1)
        ELSE p.queue = u.queue AND (p.partition IS NULL OR p.partition = u.partition) END) AS held
      FROM unnest(v_stamps, v_queues, v_partitions, v_types) u(stamp, queue, partition, type)) x;
  END IF;
  IF v_stamp > (SELECT s.last_value FROM stamps s) THEN PERFORM setval('stamps', v_stamp); END IF;
  fence := nextval('fences');
  v_most := greatest(1, p_budget / cardinality(v_lanes));
  -- A statement of its own, for a fresh snapshot: the lanes' operations are all committed by now. No ORDER BY: the
  -- nested loop gives them lane by lane, each in order, and the caller checks that.
  SELECT array_agg(h.ix::int), array_agg(o.seq), string_agg(o.id::text, ','), string_agg(o.type, ','),
      string_agg(o.priority::text, ','), array_agg(o.identity), string_agg(o.payload::text, E'\\x1e'),
      string_agg((date_part('epoch', t - o.accepted_at) * 1000)::bigint::text, ','),
      string_agg(CASE WHEN o.not_before > t OR h.held THEN '0' ELSE '1' END, ','),
      string_agg(o.attempts::text, ','), string_agg(o.max_attempts::text, ','),
      string_agg(o.timeout_ms::text, ','), array_agg(o.trace), string_agg(coalesce(o.idem::text, ''), ','),
      array_agg(o.gate), bool_or(o.gate IS NOT NULL),
      string_agg(o.id || ' ' || floor(date_part('epoch', o.expires_at - t) * 1000)::bigint, ',')
        FILTER (WHERE o.expires_at IS NOT NULL)
    INTO v_ixs, v_seqs, ids, types, priorities, v_identities, payloads, waited_ms, due, attempts, max_attempts,
      timeouts_ms, v_traces, idems, v_gates, v_gated, expire_ms
  FROM unnest(v_lanes, v_types, v_heads, v_careful, v_held) WITH ORDINALITY h(lane, type, head, careful, held, ix),
    LATERAL (
      SELECT x.seq, x.id, x.type, x.priority, x.identity, x.payload, x.accepted_at, x.not_before, x.attempts,
        x.max_attempts, x.timeout_ms, x.trace, x.idem, x.gate, x.expires_at
      FROM ops x WHERE x.lane = h.lane AND x.seq > h.head ORDER BY x.seq
      LIMIT CASE WHEN h.careful AND NOT h.type = ANY (p_trusted) THEN 1 WHEN h.type = ANY (p_together) THEN v_most
        ELSE least(p_each, v_most) END
    ) o;
  INSERT INTO leases (fence, worker, lanes, uptos, claimed_at)
    SELECT fence, p_worker, array_agg(x.lane), array_agg(x.upto), t FROM (
      SELECT v_lanes[u.ix] AS lane, max(u.seq) AS upto FROM unnest(v_ixs, v_seqs) u(ix, seq) GROUP BY u.ix
        ORDER BY v_lanes[u.ix]) x;
  lanes := array_to_string(v_lanes, ',');
  queues := array_to_json(v_queues); partitions := array_to_json(v_partitions);
  careful := array_to_string(v_careful::int[], ',');
  ixs := array_to_string(v_ixs, ','); seqs := array_to_string(v_seqs, ',');
  identities := array_to_json(v_identities); traces := array_to_json(v_traces);
  IF v_gated THEN gates := array_to_json(v_gates); END IF;
END $$;

-- The same for release 0.2.0, which knows no expiry.
CREATE OR REPLACE FUNCTION claim(
  p_worker uuid, p_want int, p_budget int, p_each int, p_turn smallint, p_types text[], p_together text[],
  p_trusted text[],
  OUT fence bigint, OUT depth bigint, OUT lanes text, OUT queues json, OUT partitions json, OUT careful text,
  OUT ixs text, OUT seqs text, OUT ids text, OUT types text, OUT priorities text, OUT identities json,
  OUT payloads text, OUT waited_ms text, OUT due text, OUT attempts text, OUT max_attempts text,
  OUT timeouts_ms text, OUT traces json, OUT idems text, OUT gates json
)
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT c.fence, c.depth, c.lanes, c.queues, c.partitions, c.careful, c.ixs, c.seqs, c.ids, c.types, c.priorities,
    c.identities, c.payloads, c.waited_ms, c.due, c.attempts, c.max_attempts, c.timeouts_ms, c.traces, c.idems, c.gates
  FROM claim_ready(p_worker, p_want, p_budget, p_each, p_turn, p_types, p_together, p_trusted) c
$$;

-- Records the start of operations that run long. What was handed out after them in their lanes is handed out no more.
CREATE OR REPLACE FUNCTION mark(
  p_worker uuid, m_fence bigint[], m_lane uuid[], m_seq bigint[], m_ago_ms bigint[]
) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  r record;
  t timestamptz := clock();
BEGIN
  FOR r IN SELECT u.fence, array_agg(u.lane) AS lanes, array_agg(u.seq) AS seqs, array_agg(u.ago) AS agos
           FROM unnest(m_fence, m_lane, m_seq, m_ago_ms) u(fence, lane, seq, ago) GROUP BY u.fence ORDER BY u.fence LOOP
    UPDATE leases l SET uptos = (
      SELECT array_agg(coalesce((SELECT g.seq FROM unnest(r.lanes, r.seqs) g(lane, seq)
              WHERE g.lane = z.lane), z.upto) ORDER BY z.i)
      FROM unnest(l.lanes, l.uptos) WITH ORDINALITY z(lane, upto, i))
    WHERE l.fence = r.fence AND l.worker = p_worker;
    CONTINUE WHEN NOT FOUND;
    PERFORM FROM lanes l WHERE l.id = ANY (r.lanes) ORDER BY l.id FOR UPDATE;
    UPDATE lanes l SET running = true WHERE l.id = ANY (r.lanes);
    UPDATE ops o SET started_at = t - g.ago * interval '1 ms' FROM unnest(r.lanes, r.seqs, r.agos) g(lane, seq, ago)
    WHERE o.lane = g.lane AND o.seq = g.seq;
  END LOOP;
END $$;

-- A step of accept. Leases the lanes whose first item runs at once.
CREATE OR REPLACE FUNCTION lease_take(
  p_worker uuid, p_ids uuid[], p_lane int[], p_verdicts text[], p_seqs bigint[], p_at timestamptz
) RETURNS bigint
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_fence bigint := nextval('fences');
BEGIN
  INSERT INTO leases (fence, worker, lanes, uptos, claimed_at)
    SELECT v_fence, p_worker, array_agg(p_ids[u.lane]), array_agg(u.seq), p_at
    FROM unnest(p_lane, p_verdicts, p_seqs) u(lane, verdict, seq) WHERE u.verdict = 'execute';
  RETURN v_fence;
END $$;
`,
    },
    {
      name: 'clock',
      sql: `-- The one clock: leases, windows, delays and the order in time read it.
--
-- Tests and benchmarks replace it, so it is created only where it is missing: installing the functions again must not
-- undo a replacement.

DO $do$
BEGIN
  IF to_regprocedure(quote_ident(current_schema()) || '.clock()') IS NULL THEN
    CREATE FUNCTION clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$ SELECT clock_timestamp() $$;
  END IF;
END $do$;
`,
    },
    {
      name: 'failures',
      sql: `-- The last error of operations that failed (tables/0007-failures.sql), and dead letters that nobody needs because the
-- caller was answered.

-- In the statement of the settlement that records the failures. Nothing if that was refused: then p_lost has fences.
CREATE OR REPLACE FUNCTION failures_keep(
  p_lost bigint[], p_ids uuid[], p_attempts int[], p_codes text[], p_statuses smallint[], p_keep boolean[],
  p_stacks text[]
) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  IF cardinality(p_lost) > 0 THEN RETURN; END IF;
  INSERT INTO failures AS f (id, attempt, code, http_status, keep_letter, stack, sweep_at)
    SELECT u.id, u.attempt, u.code, u.status, u.keep, u.stack, t + interval '1 hour'
    FROM unnest(p_ids, p_attempts, p_codes, p_statuses, p_keep, p_stacks) u(id, attempt, code, status, keep, stack)
    ORDER BY u.id
    ON CONFLICT (id) DO UPDATE SET attempt = excluded.attempt, code = excluded.code,
      http_status = excluded.http_status, keep_letter = excluded.keep_letter, stack = excluded.stack;
END $$;

-- A caller that waited for a queued operation was answered with what its handler said (FailOperation): its dead letter
-- becomes history. Nothing if it was redriven meanwhile, or if the handler wants the letter.
CREATE OR REPLACE FUNCTION letter_answered(p_id uuid) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  WITH gone AS (
    DELETE FROM dead_letters d USING failures f
    WHERE d.id = p_id AND f.id = d.id AND f.attempt = d.attempts AND f.code IS NOT NULL AND NOT f.keep_letter
    RETURNING d.*
  )
  INSERT INTO history (id, finished_at, status, type, queue, partition, priority, identity, accepted_at, started_at,
      attempts, max_attempts, error, result, trace)
    SELECT g.id, g.died_at, 'failed', g.type, g.queue, g.partition, g.priority, g.identity, g.accepted_at, g.started_at,
      g.attempts, g.max_attempts, g.error, g.result, g.trace
    FROM gone g;
  IF FOUND THEN PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, '!dead', -1); END IF;
END $$;

-- Removes those whose operation is gone; looks at the others again later. Returns how many went, and whether there may
-- be more.
CREATE OR REPLACE FUNCTION failures_sweep(p_rows int, OUT failures int, OUT is_full boolean)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_looked int;
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  WITH old AS MATERIALIZED (
    SELECT x.ctid AS at, EXISTS (SELECT FROM ops o WHERE o.id = x.id)
      OR EXISTS (SELECT FROM dead_letters d WHERE d.id = x.id)
      OR EXISTS (SELECT FROM history h WHERE h.id = x.id) AS is_needed
    FROM failures x WHERE x.sweep_at < t ORDER BY x.sweep_at LIMIT p_rows FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM failures d WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o WHERE NOT o.is_needed)) RETURNING 1
  ), kept AS (
    UPDATE failures d SET sweep_at = t + interval '1 hour'
      WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o WHERE o.is_needed))
  ) SELECT (SELECT count(*) FROM gone), count(*) INTO failures, v_looked FROM old o;
  is_full := v_looked >= p_rows;
END $$;
`,
    },
    {
      name: 'gates',
      sql: `-- The gates that count: capacity and rate, for the items of a flush that are not decided yet.
--
-- gates_take is a step of accept. What is asked for is added at once in one statement per kind of gate. Only if that
-- does not fit, ration walks the items one by one and the rest is taken back.
CREATE OR REPLACE FUNCTION gates_take(
  p_gates text[], p_rate_key uuid[], p_rate_asked int[], p_rate_limit int[], p_rate_minutes int[],
  p_rate_keep int[], p_rate_ix int[], p_rate_item int[], p_decided text[], p_items int, p_at timestamptz,
  OUT verdicts text[], OUT tiers int[], OUT rates_left bigint[], OUT rates_reset_ms bigint[], OUT at_ms bigint
)
  LANGUAGE plpgsql AS $$
DECLARE
  v_tight boolean := false; v_odd boolean := false;
  v_names text[]; v_gates_left bigint[]; v_gates_asked bigint[]; v_gates_gave bigint[];
  v_rates_left int[]; v_rates_asked int[]; v_rates_gave int[]; v_waits_ms bigint[];
  r record;
BEGIN
  verdicts := p_decided;
  IF cardinality(p_rate_key) > 0 THEN
    v_rates_asked := CASE WHEN p_decided IS NULL THEN p_rate_asked
      ELSE rates_asked(p_rate_ix, p_rate_item, p_decided, cardinality(p_rate_key)) END;
    r := rates_take(p_rate_key, v_rates_asked, p_rate_limit, p_rate_minutes, p_rate_keep, p_at);
    v_rates_left := r.left_now; v_waits_ms := r.waits_ms; v_tight := r.is_tight; v_odd := r.is_odd;
  END IF;
  IF cardinality(p_gates) > 0 THEN
    r := capacity_take(p_gates, p_decided);
    v_names := r.names; v_gates_left := r.left_now; v_gates_asked := r.asked; v_tight := v_tight OR r.is_tight;
  END IF;
  v_rates_gave := v_rates_asked; v_gates_gave := v_gates_asked;
  IF v_tight THEN
    r := ration(p_gates, v_names, v_gates_left, p_rate_ix, p_rate_item, v_rates_left, p_decided, p_items);
    verdicts := r.verdicts; v_gates_gave := r.gates_gave; v_rates_gave := r.rates_gave;
    PERFORM rates_return(p_rate_key, v_rates_asked, v_rates_gave);
  END IF;
  IF v_names IS NOT NULL THEN PERFORM capacity_hold(v_names, v_gates_gave, p_at); END IF;
  IF v_rates_left IS NULL THEN RETURN; END IF;
  IF v_tight OR v_odd THEN v_waits_ms := rates_waits(p_rate_key, p_rate_limit, p_rate_minutes, p_at); END IF;
  r := rates_status(p_rate_ix, p_rate_item, p_items, verdicts, v_rates_left, v_rates_gave, v_waits_ms);
  tiers := r.tiers; rates_left := r.rates_left; rates_reset_ms := r.rates_reset_ms;
  at_ms := floor(extract(epoch FROM p_at) * 1000);
END $$;

-- Item by item, in order. Capacity before rate; a refused item takes from neither.
CREATE OR REPLACE FUNCTION ration(
  p_gates text[], p_names text[], p_gates_left bigint[], p_rate_ix int[], p_rate_item int[], p_rates_left int[],
  p_decided text[], p_items int,
  OUT verdicts text[], OUT gates_gave bigint[], OUT rates_gave int[]
)
  LANGUAGE plpgsql AS $$
DECLARE
  v_gate int; v_tiers int[]; v_fits boolean; v_tier int;
BEGIN
  verdicts := coalesce(p_decided, array_fill(NULL::text, ARRAY[p_items]));
  gates_gave := array_fill(0::bigint, ARRAY[coalesce(cardinality(p_names), 0)]);
  rates_gave := array_fill(0, ARRAY[coalesce(cardinality(p_rates_left), 0)]);
  FOR v_item IN 1 .. p_items LOOP
    CONTINUE WHEN verdicts[v_item] IS NOT NULL;
    v_gate := CASE WHEN p_gates[v_item] IS NOT NULL THEN array_position(p_names, p_gates[v_item]) END;
    IF v_gate IS NOT NULL AND p_gates_left[v_gate] - gates_gave[v_gate] <= 0 THEN
      verdicts[v_item] := 'capacity_full';
      CONTINUE;
    END IF;
    v_tiers := ARRAY(SELECT u.ix FROM unnest(p_rate_ix, p_rate_item) WITH ORDINALITY u(ix, item, i)
      WHERE coalesce(u.item, u.i) = v_item);
    v_fits := true;
    FOREACH v_tier IN ARRAY v_tiers LOOP
      v_fits := v_fits AND p_rates_left[v_tier] - rates_gave[v_tier] > 0;
    END LOOP;
    IF NOT v_fits THEN
      verdicts[v_item] := 'rate_limited';
      CONTINUE;
    END IF;
    IF v_gate IS NOT NULL THEN gates_gave[v_gate] := gates_gave[v_gate] + 1; END IF;
    FOREACH v_tier IN ARRAY v_tiers LOOP
      rates_gave[v_tier] := rates_gave[v_tier] + 1;
    END LOOP;
  END LOOP;
END $$;
`,
    },
    {
      name: 'halts',
      sql: `-- Halts: behind a halt nothing is accepted. halt_set waits for every flush that has passed halts_check, so nothing
-- more is accepted after it returns.

-- A step of accept. Decides the items whose scope is halted.
CREATE OR REPLACE FUNCTION halts_check(p_scopes text[], p_decided text[]) RETURNS text[]
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_decided text[] := p_decided; v_item int;
BEGIN
  PERFORM pg_advisory_xact_lock_shared(hashtext('spillway.halts'), hashtext(current_schema()));
  FOR v_item IN SELECT u.i FROM unnest(p_scopes) WITH ORDINALITY u(scope, i) JOIN halts h ON h.scope = u.scope LOOP
    v_decided := coalesce(v_decided, array_fill(NULL::text, ARRAY[cardinality(p_scopes)]));
    v_decided[v_item] := coalesce(v_decided[v_item], 'halted');
  END LOOP;
  RETURN v_decided;
END $$;

-- True if it was not halted before.
CREATE OR REPLACE FUNCTION halt_set(p_scope text, p_reason text) RETURNS boolean
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtext('spillway.halts'), hashtext(current_schema()));
  INSERT INTO halts (scope, reason, since) VALUES (p_scope, p_reason, clock()) ON CONFLICT (scope) DO NOTHING;
  RETURN FOUND;
END $$;
`,
    },
    {
      name: 'idempotency',
      sql: `-- Idempotency keys: the first request of a key takes it, later ones get its answer.
--
-- idempotency_take, idempotency_release and idempotency_answer are steps of accept and run with its settings.

-- Takes the keys, in key order. verdicts is NULL if all of them are new. A key that is there already says what to
-- answer.
CREATE OR REPLACE FUNCTION idempotency_take(
  p_keys uuid[], p_requests uuid[], p_ops uuid[], p_batch int[], p_at timestamptz, p_ttl_ms bigint,
  OUT verdicts text[], OUT answers json[], OUT ops uuid[]
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_seen int[]; v_wrong text[]; r record;
BEGIN
  WITH k AS (
    SELECT u.key, u.request, u.i FROM unnest(p_keys, p_requests) WITH ORDINALITY u(key, request, i)
    WHERE u.key IS NOT NULL ORDER BY u.key
  ), made AS (
    INSERT INTO idempotency AS d (key, request, op, expires_at)
    SELECT k.key, k.request, p_ops[k.i], p_at + p_ttl_ms * interval '1 ms' FROM k
    ON CONFLICT (key) DO UPDATE
      SET request = excluded.request, op = excluded.op, answer = NULL, expires_at = excluded.expires_at
      WHERE d.expires_at <= p_at
    RETURNING d.key
  )
  SELECT array_agg(k.i::int) INTO v_seen FROM k WHERE k.key NOT IN (SELECT made.key FROM made);
  IF v_seen IS NULL THEN RETURN; END IF;
  verdicts := array_fill(NULL::text, ARRAY[cardinality(p_keys)]);
  answers := array_fill(NULL::json, ARRAY[cardinality(p_keys)]);
  ops := array_fill(NULL::uuid, ARRAY[cardinality(p_keys)]);
  FOR r IN SELECT s.i, d.request = p_requests[s.i] AS is_same, d.answer, d.op
      FROM unnest(v_seen) s(i) LEFT JOIN idempotency d ON d.key = p_keys[s.i] LOOP
    verdicts[r.i] := CASE WHEN r.is_same IS NOT TRUE THEN 'mismatch' WHEN r.answer IS NULL THEN 'in_progress'
      ELSE 'replay' END;
    answers[r.i] := r.answer;
    ops[r.i] := r.op;
  END LOOP;
  -- A batch is one request with one answer: what is wrong with one of its keys is wrong with all of it.
  IF cardinality(p_batch) > 0 AND verdicts && '{mismatch,in_progress}' THEN
    SELECT array_agg(coalesce(b.verdict, u.verdict) ORDER BY u.i) INTO v_wrong
      FROM unnest(p_batch, verdicts) WITH ORDINALITY u(batch, verdict, i)
      LEFT JOIN (
        SELECT x.batch, CASE WHEN bool_or(x.verdict = 'in_progress') THEN 'in_progress' ELSE 'mismatch' END AS verdict
        FROM unnest(p_batch, verdicts) x(batch, verdict) WHERE x.verdict IN ('mismatch', 'in_progress') GROUP BY x.batch
      ) b ON b.batch = u.batch;
    DELETE FROM idempotency d USING unnest(p_keys, p_ops, verdicts, v_wrong) u(key, op, verdict, wrong)
      WHERE u.verdict IS NULL AND u.wrong IS NOT NULL AND d.key = u.key AND d.op = u.op;
    verdicts := v_wrong;
  END IF;
END $$;

-- A refused item gives its key back.
CREATE OR REPLACE FUNCTION idempotency_release(p_keys uuid[], p_verdicts text[]) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  DELETE FROM idempotency d USING unnest(p_keys, p_verdicts) u(key, verdict)
    WHERE d.key = u.key AND u.verdict IN ('capacity_full', 'rate_limited', 'halted', 'depth_full');
END $$;

-- What is queued, or answers with a ticket, stores that answer with its key.
CREATE OR REPLACE FUNCTION idempotency_answer(
  p_keys uuid[], p_verdicts text[], p_places bigint[], p_waits_ms bigint[], p_reasons text[]
) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE idempotency d
    SET answer = json_build_object('v', 'queue', 'place', u.place, 'wait_ms', u.wait_ms, 'reason', u.reason)
    FROM unnest(p_keys, p_verdicts, p_places, p_waits_ms, p_reasons) u(key, verdict, place, wait_ms, reason)
    WHERE (u.verdict = 'queue' OR u.verdict = 'execute' AND u.reason IN ('requested', 'still_running'))
      AND d.key = u.key;
END $$;

-- What the effect of the applied items returned is the answer for their keys.
CREATE OR REPLACE FUNCTION keys_applied(
  p_keys uuid[], p_ids uuid[], p_verdicts text[], p_results json[]
) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  IF cardinality(p_results) IS DISTINCT FROM cardinality(p_verdicts) THEN
    RAISE EXCEPTION 'the effect returned % results for % items', coalesce(cardinality(p_results), 0),
      cardinality(p_verdicts) USING ERRCODE = 'P0001';
  END IF;
  IF cardinality(p_keys) = 0 THEN RETURN; END IF;
  UPDATE idempotency d SET answer = json_build_object('v', 'done', 'result', u.result)
    FROM unnest(p_keys, p_ids, p_verdicts, p_results) u(key, op, verdict, result)
    WHERE u.verdict = 'apply' AND d.key = u.key AND d.op = u.op;
END $$;

-- A step of settle. Only while the row is this operation's: an expired key may belong to a later request by now.
CREATE OR REPLACE FUNCTION idempotency_settle(r_lane uuid[], r_seq bigint[], r_key uuid[], r_answer text[]) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE idempotency d SET answer = u.answer::json
    FROM (
      SELECT x.key, x.answer, o.id FROM unnest(r_lane, r_seq, r_key, r_answer) x(lane, seq, key, answer)
      JOIN ops o ON o.lane = x.lane AND o.seq = x.seq WHERE x.key IS NOT NULL ORDER BY x.key OFFSET 0
    ) u
    WHERE d.key = u.key AND d.op = u.id AND d.answer IS NULL;
END $$;
`,
    },
    {
      name: 'lanes-page',
      sql: `-- A page of the lanes that hold operations, for operators.
--
-- In the order of the lanes' ids, which never change. It walks the queue's primary key from lane to lane, one probe
-- each, so it reads neither empty lanes, of which there may be millions, nor the operations behind a lane's first. A
-- walk over the lanes themselves would read the empty ones too, and an index by queue is one more write for each new
-- lane.

-- p_queue, p_patterns: only lanes of this queue, and of these (\`orders*\`: a prefix); NULL: all, without those of
-- parallel operations. Each of these has a lane of its own, whose id is the operation's and whose queue is its type:
-- among a million of them the others could not be seen, and one scan passes them (300,000: 0.35 s on two busy cores).
-- It examines p_examined lanes at most. \`last\` is the last of them if they were all used up, so that there may be more
-- behind it; else NULL. One row without an id if no lane fits.
CREATE OR REPLACE FUNCTION lanes_page(
  p_queue text, p_patterns text[], p_after uuid, p_limit int, p_examined int
)
RETURNS TABLE (
  id uuid, queue text, partition text, depth bigint, paused_by text, ready boolean, label text, parked_for text,
  due_at timestamptz, due_ms bigint, age_ms bigint, head uuid, type text, started boolean, attempts int,
  max_attempts int, last uuid
)
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_hashjoin = off SET enable_mergejoin = off
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_lane uuid := coalesce(p_after, '00000000-0000-0000-0000-000000000000');
  v_found uuid[] := '{}'; v_last uuid;
  w record;
BEGIN
  FOR w IN
    WITH RECURSIVE walk(lane, n) AS (
      (SELECT o.lane, 1 FROM ops o WHERE o.lane > v_lane AND (o.lane <> o.id OR o.type = p_queue)
        ORDER BY o.lane LIMIT 1)
      UNION ALL
      SELECT x.lane, p.n + 1 FROM walk p
        CROSS JOIN LATERAL (
          SELECT o.lane FROM ops o WHERE o.lane > p.lane AND (o.lane <> o.id OR o.type = p_queue)
          ORDER BY o.lane LIMIT 1
        ) x
        WHERE p.n < p_examined
    )
    SELECT k.lane, k.n, (p_queue IS NULL OR l.queue = p_queue) AND queue_matches(l.queue, p_patterns) AS fits
    FROM walk k JOIN lanes l ON l.id = k.lane
  LOOP
    IF w.fits THEN v_found := v_found || w.lane; END IF;
    IF w.n = p_examined THEN v_last := w.lane; END IF;
    EXIT WHEN cardinality(v_found) = p_limit;
  END LOOP;
  RETURN QUERY
  SELECT l.id, l.queue, l.partition, l.depth,
    (SELECT CASE WHEN s.queue = '' THEN 'type' WHEN s.partition IS NULL THEN 'queue' ELSE 'partition' END FROM pauses s
      WHERE CASE WHEN s.queue = '' THEN s.partition = o.type
        ELSE s.queue = l.queue AND (s.partition IS NULL OR s.partition = l.partition) END
      ORDER BY s.queue = '', s.partition NULLS FIRST LIMIT 1),
    r.lane IS NOT NULL, CASE WHEN r.type <> o.type THEN r.type END, p.reason, nullif(p.until, 'infinity'),
    (extract(epoch FROM nullif(p.until, 'infinity') - t) * 1000)::bigint,
    greatest(0, extract(epoch FROM t - o.accepted_at) * 1000)::bigint, o.id, o.type, o.started_at IS NOT NULL,
    o.attempts, o.max_attempts, v_last
  FROM unnest(v_found) WITH ORDINALITY u(lane, i)
  JOIN lanes l ON l.id = u.lane
  CROSS JOIN LATERAL (SELECT x.* FROM ops x WHERE x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1) o
  LEFT JOIN parked p ON p.lane = l.id
  LEFT JOIN ready r ON r.priority = o.priority AND r.stamp = o.stamp AND r.lane = l.id
  ORDER BY u.i;
  IF NOT FOUND THEN
    last := v_last;
    RETURN NEXT;
  END IF;
END $$;

-- Is the queue one of these names, where \`orders*\` means a prefix? NULL: all are. The same as mayUseQueue of
-- http/queue-names.ts.
CREATE OR REPLACE FUNCTION queue_matches(p_queue text, p_patterns text[]) RETURNS boolean
  LANGUAGE sql IMMUTABLE AS $$
  SELECT p_patterns IS NULL OR EXISTS (SELECT FROM unnest(p_patterns) x(pattern)
    WHERE CASE WHEN right(x.pattern, 1) = '*' THEN starts_with(p_queue, left(x.pattern, -1))
      ELSE p_queue = x.pattern END)
$$;
`,
    },
    {
      name: 'lanes',
      sql: `-- Lanes: how items are appended to them, and where a lane waits: ready, or parked by a delay, a pause or its turn.
--
-- lanes_count, lanes_append, lanes_take and lanes_start are steps of accept and run with its settings.

-- How many undecided items each lane gets. The lanes that get any, in the given order; per item its number among these
-- lanes and its number in the lane (0: it is decided, and gets none). may_run: may the lane's first item run at once?
CREATE OR REPLACE FUNCTION lanes_count(
  p_lanes uuid[], p_queues text[], p_partitions text[], p_lane int[], p_reason text[], p_decided text[],
  OUT ids uuid[], OUT queues text[], OUT partitions text[], OUT counts bigint[], OUT may_run boolean[],
  OUT lane int[], OUT rn bigint[]
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_kept int[];
BEGIN
  SELECT array_agg(coalesce(x.rn, 0) ORDER BY x.i) INTO rn FROM (
    SELECT u.i, CASE WHEN u.decided IS NULL
        THEN row_number() OVER (PARTITION BY u.lane, u.decided IS NULL ORDER BY u.i) END AS rn
    FROM unnest(p_lane, p_decided) WITH ORDINALITY u(lane, decided, i)) x;
  SELECT array_agg(x.lane), array_agg(x.n), array_agg(x.may_run) INTO v_kept, counts, may_run FROM (
    SELECT u.lane, max(u.rn) AS n,
      bool_or(u.rn = 1 AND u.reason IN ('', '+requested', '+still_running')) AS may_run
    FROM unnest(p_lane, rn, p_reason) u(lane, rn, reason) WHERE u.rn > 0 GROUP BY u.lane ORDER BY u.lane) x;
  SELECT array_agg(p_lanes[u.k]), array_agg(p_queues[u.k]), array_agg(p_partitions[u.k]) INTO ids, queues, partitions
    FROM unnest(v_kept) u(k);
  SELECT array_agg(CASE WHEN u.rn > 0 THEN array_position(v_kept, u.lane) ELSE 0 END) INTO lane
    FROM unnest(p_lane, rn) u(lane, rn);
END $$;

-- Appends to the lanes, in id order: sequences are given here, under the lane's lock. p_may_run: an empty lane starts
-- at once; where p_apply, head moves with tail. running: 1 if the first operation is known to run.
CREATE OR REPLACE FUNCTION lanes_append(
  p_ids uuid[], p_queues text[], p_partitions text[], p_counts bigint[], p_may_run boolean[], p_apply boolean,
  p_at timestamptz,
  OUT tails bigint[], OUT depths bigint[], OUT running int[], OUT paces real[], OUT blocked bigint[]
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  WITH up AS (
    INSERT INTO lanes AS l (id, queue, partition, head, tail, depth, running, moved_at, sweep_at)
    SELECT u.id, u.queue, u.partition, CASE WHEN p_apply AND u.may_run THEN u.n ELSE 0 END, u.n,
      CASE WHEN p_apply AND u.may_run THEN 0 ELSE u.n END, NOT p_apply AND u.may_run, p_at, p_at + interval '1 hour'
    FROM unnest(p_ids, p_queues, p_partitions, p_counts, p_may_run) u(id, queue, partition, n, may_run)
    ON CONFLICT (id) DO UPDATE SET
      tail = l.tail + excluded.tail,
      -- excluded.head says that these may be applied at once.
      head = CASE WHEN excluded.head > 0 AND l.depth = 0 THEN l.tail + excluded.tail ELSE l.head END,
      depth = CASE WHEN excluded.head > 0 AND l.depth = 0 THEN 0 ELSE l.depth + excluded.tail END,
      running = CASE WHEN l.depth = 0 THEN excluded.running ELSE l.running END,
      moved_at = CASE WHEN l.depth = 0 THEN p_at ELSE l.moved_at END
    RETURNING l.tail, l.depth, l.running, l.pace_ms,
      -- How long its head is delayed or waits for its next attempt. How long a pause lasts is unknown.
      CASE WHEN l.depth > 1 AND NOT l.running
        THEN (SELECT (date_part('epoch', x.until - p_at) * 1000)::bigint FROM parked x
          WHERE x.lane = l.id AND x.reason <> 'pause') END AS blocked_ms
  )
  SELECT array_agg(up.tail), array_agg(up.depth), array_agg(up.running::int), array_agg(coalesce(up.pace_ms, -1)),
      array_agg(up.blocked_ms)
    INTO tails, depths, running, paces, blocked FROM up;
END $$;

-- The same for a flush with parallel operations. A function of its own: the three columns cost others 1% of a flush.
-- p_alone: the lane is one parallel operation's; p_turn_keys: and has this key. What is parallel and applied at once
-- needs no lane.
CREATE OR REPLACE FUNCTION lanes_take(
  p_ids uuid[], p_queues text[], p_partitions text[], p_counts bigint[], p_may_run boolean[], p_alone boolean[],
  p_turn_keys uuid[], p_apply boolean, p_at timestamptz,
  OUT tails bigint[], OUT depths bigint[], OUT running int[], OUT paces real[], OUT blocked bigint[]
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  IF p_apply AND true = ALL (p_alone || p_may_run) AND cardinality(p_alone) = cardinality(p_ids) THEN
    tails := p_counts; depths := array_fill(0::bigint, ARRAY[cardinality(p_ids)]);
    running := array_fill(0, ARRAY[cardinality(p_ids)]); paces := array_fill(-1::real, ARRAY[cardinality(p_ids)]);
    RETURN;
  END IF;
  WITH up AS (
    INSERT INTO lanes AS l (id, queue, partition, head, tail, depth, running, moved_at, sweep_at, alone, key, turn)
    SELECT u.id, u.queue, u.partition, CASE WHEN p_apply AND u.may_run THEN u.n ELSE 0 END, u.n,
      CASE WHEN p_apply AND u.may_run THEN 0 ELSE u.n END, NOT p_apply AND u.may_run, p_at, p_at + interval '1 hour',
      coalesce(u.alone, false), u.key, CASE WHEN u.key IS NOT NULL THEN nextval('turn_numbers') END
    FROM unnest(p_ids, p_queues, p_partitions, p_counts, p_may_run, p_alone, p_turn_keys)
      u(id, queue, partition, n, may_run, alone, key)
    ON CONFLICT (id) DO UPDATE SET
      tail = l.tail + excluded.tail,
      -- excluded.head says that these may be applied at once.
      head = CASE WHEN excluded.head > 0 AND l.depth = 0 THEN l.tail + excluded.tail ELSE l.head END,
      depth = CASE WHEN excluded.head > 0 AND l.depth = 0 THEN 0 ELSE l.depth + excluded.tail END,
      running = CASE WHEN l.depth = 0 THEN excluded.running ELSE l.running END,
      moved_at = CASE WHEN l.depth = 0 THEN p_at ELSE l.moved_at END
    RETURNING l.tail, l.depth, l.running, l.pace_ms,
      -- How long its head is delayed or waits for its next attempt. How long a pause lasts is unknown.
      CASE WHEN l.depth > 1 AND NOT l.running
        THEN (SELECT (date_part('epoch', x.until - p_at) * 1000)::bigint FROM parked x
          WHERE x.lane = l.id AND x.reason <> 'pause') END AS blocked_ms
  )
  SELECT array_agg(up.tail), array_agg(up.depth), array_agg(up.running::int), array_agg(coalesce(up.pace_ms, -1)),
      array_agg(up.blocked_ms)
    INTO tails, depths, running, paces, blocked FROM up;
  IF p_apply AND cardinality(p_alone) > 0 THEN PERFORM lanes_drop(p_ids); END IF;
END $$;

-- What was given per lane of p_from, for the lanes of p_to. Empty stays empty.
CREATE OR REPLACE FUNCTION lanes_pick(
  p_from uuid[], p_to uuid[], p_alone boolean[], p_keys uuid[], p_most int[],
  OUT alone boolean[], OUT keys uuid[], OUT most int[]
)
  LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN cardinality(p_alone) > 0 THEN array_agg(p_alone[u.at] ORDER BY u.i) ELSE p_alone END,
    CASE WHEN cardinality(p_keys) > 0 THEN array_agg(p_keys[u.at] ORDER BY u.i) ELSE p_keys END,
    CASE WHEN cardinality(p_most) > 0 THEN array_agg(p_most[u.at] ORDER BY u.i) ELSE p_most END
  FROM (SELECT x.i, array_position(p_from, x.id) AS at FROM unnest(p_to) WITH ORDINALITY x(id, i)) u
$$;

-- Removes the lanes of parallel operations that have left. The caller holds their locks.
CREATE OR REPLACE FUNCTION lanes_drop(p_ids uuid[]) RETURNS void
  LANGUAGE sql AS $$
  DELETE FROM lanes l WHERE l.id = ANY (p_ids) AND l.alone AND l.depth = 0
$$;

-- Puts the lanes that were empty where they belong. They were empty, so no operation in them is suspected of a crash.
-- p_parked: they are parked already.
CREATE OR REPLACE FUNCTION lanes_start(
  p_ids uuid[], p_queues text[], p_partitions text[], p_counts bigint[], p_depths bigint[],
  p_lane int[], p_rn bigint[], p_verdicts text[], p_priority smallint[], p_stamps bigint[], p_delay_ms bigint[],
  p_type text[], p_seqs bigint[], p_parked boolean[], p_at timestamptz
) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
    SELECT p_ids[u.lane], u.priority, u.stamp, u.type, u.seq - 1, p_depths[u.lane], false, p_queues[u.lane],
      p_partitions[u.lane]
    FROM unnest(p_lane, p_rn, p_verdicts, p_priority, p_stamps, p_delay_ms, p_type, p_seqs)
      u(lane, rn, verdict, priority, stamp, delay_ms, type, seq)
    WHERE u.rn = 1 AND u.verdict = 'queue' AND u.delay_ms = 0 AND p_depths[u.lane] = p_counts[u.lane]
      AND p_parked[u.lane] IS NOT TRUE;
  IF 0 < ANY (p_delay_ms) THEN
    INSERT INTO parked (lane, until, reason)
      SELECT p_ids[u.lane], p_at + u.delay_ms * interval '1 ms', 'delay'
      FROM unnest(p_lane, p_rn, p_verdicts, p_delay_ms) u(lane, rn, verdict, delay_ms)
      WHERE u.rn = 1 AND u.verdict = 'queue' AND u.delay_ms > 0 AND p_depths[u.lane] = p_counts[u.lane]
        AND p_parked[u.lane] IS NOT TRUE;
  END IF;
END $$;

-- Refuses what would have to wait, with all of its batch, because nothing more may wait. Takes no locks, which would
-- come before those of the rates: a lane that fills up at this moment takes one more.
CREATE OR REPLACE FUNCTION depth_check(
  p_batch int[], p_lane int[], p_reason text[], p_decided text[], p_lanes uuid[], p_queues text[], p_partitions text[],
  p_type text
) RETURNS text[]
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  RETURN (
    WITH waiting AS (
      SELECT DISTINCT u.batch FROM unnest(p_batch, p_lane, p_reason, p_decided) u(batch, lane, reason, decided)
      WHERE u.decided IS NULL AND (u.reason <> ''
        OR EXISTS (SELECT FROM lanes l WHERE l.id = p_lanes[u.lane] AND l.depth > 0)
        OR EXISTS (SELECT FROM pauses s WHERE CASE WHEN s.queue = '' THEN s.partition = p_type
          ELSE s.queue = p_queues[u.lane] AND (s.partition IS NULL OR s.partition = p_partitions[u.lane]) END))
    )
    SELECT array_agg(coalesce(u.decided, CASE WHEN u.batch IN (SELECT w.batch FROM waiting w) THEN 'depth_full' END))
    FROM unnest(p_batch, p_decided) u(batch, decided));
END $$;

-- Puts a lane that has operations where it belongs. The caller holds its lock, and it is nowhere else. A lane with a
-- key waits for its turn: the caller holds the key's lock too, has given the lane's permit back, and calls turns_next.
CREATE OR REPLACE FUNCTION lane_requeue(p_lane uuid) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  o record;
BEGIN
  SELECT x.priority, x.stamp, x.type, x.not_before, l.head, l.depth, l.careful > l.head AS careful, l.queue,
    l.partition, l.key, l.turn INTO o FROM lanes l, ops x
    WHERE l.id = p_lane AND x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1;
  IF NOT FOUND THEN
    RETURN;
  ELSIF lane_paused(p_lane) THEN
    INSERT INTO parked (lane, until, reason, key, turn) VALUES (p_lane, 'infinity', 'pause', o.key, o.turn);
  ELSIF o.not_before > t THEN
    INSERT INTO parked (lane, until, reason, key, turn) VALUES (p_lane, o.not_before, 'delay', o.key, o.turn);
  ELSIF o.key IS NOT NULL THEN
    INSERT INTO parked (lane, until, reason, key, turn) VALUES (p_lane, 'infinity', 'turn', o.key, o.turn);
  ELSE
    INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
      VALUES (p_lane, o.priority, o.stamp, o.type, o.head, o.depth, o.careful, o.queue, o.partition);
  END IF;
END $$;
`,
    },
    {
      name: 'ledger',
      sql: `-- The ledger: events, appended in the transaction of what they record, each with the hash of the one before it.
--
-- ledger_head is one row, locked from the append to the commit. That makes the numbers gapless and the chain one chain,
-- and it is why appending is the last lock that a transaction takes. A row's hash is the SHA-256 of the row without its
-- hash in RFC 8785 form (ledger_form_before, prev_hash, ledger_form_behind): members sorted, no spaces; to_json quotes
-- texts exactly as ECMAScript does. Payloads arrive in that form (src/ledger/canonical.ts) and are stored as they came:
-- json would keep the text too, but would not say so.

CREATE OR REPLACE FUNCTION ledger_refuse() RETURNS trigger
  LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'the ledger is append-only: % is refused', TG_OP USING ERRCODE = '42501';
END $$;

DO $do$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = 'ledger'::regclass AND g.tgname = 'ledger_append_only') THEN
    CREATE TRIGGER ledger_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger
      FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse();
  END IF;
END $do$;

-- A time as it is reported and hashed. A time that RFC 3339 in milliseconds cannot express, in a row that was tampered
-- with, is written as PostgreSQL prints it: two times never have one text, or a change from one to the other would go
-- unseen.
CREATE OR REPLACE FUNCTION ledger_time(p_at timestamptz) RETURNS text
  LANGUAGE sql STABLE AS $$
  SELECT CASE WHEN p_at = date_trunc('milliseconds', p_at) AND p_at >= '0001-01-01 00:00:00Z'
    AND p_at < '10000-01-01 00:00:00Z'
    THEN to_char(p_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') ELSE p_at::text END
$$;

-- The form around the hash of the row before.
CREATE OR REPLACE FUNCTION ledger_form_before(p_time text, p_actor text, p_payload text) RETURNS text
  LANGUAGE sql STABLE AS $$
  SELECT '{"actor":' || to_json(p_actor)::text || ',"at":"' || p_time || '","payload":' || p_payload || ',"prev_hash":"'
$$;

CREATE OR REPLACE FUNCTION ledger_form_behind(p_seq bigint, p_type text, p_trace_id text) RETURNS text
  LANGUAGE sql STABLE AS $$
  SELECT '","seq":' || p_seq || ',"trace_id":' || to_json(p_trace_id)::text || ',"type":' || to_json(p_type)::text
    || '}'
$$;

-- Answers the last number. The caller takes no further lock behind it.
CREATE OR REPLACE FUNCTION ledger_append(
  p_types text[], p_actors text[], p_traces text[], p_payloads text[]
) RETURNS bigint
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_seq bigint; v_hash text; t timestamptz; v_time text;
  v_before text[]; v_behind text[];
  v_prevs text[]; v_hashes text[];
  v_n int := coalesce(cardinality(p_types), 0);
BEGIN
  SELECT h.seq, h.hash INTO STRICT v_seq, v_hash FROM ledger_head h FOR UPDATE;
  -- Under the lock: times stand in the order of the numbers.
  t := date_trunc('milliseconds', clock());
  v_time := ledger_time(t);
  -- The form of each row around the hash of the one before it; the loop has only that left to do.
  SELECT array_agg(ledger_form_before(v_time, u.actor, u.payload)),
    array_agg(ledger_form_behind(v_seq + u.i, u.type, u.trace))
    INTO v_before, v_behind
      FROM unnest(p_types, p_actors, p_traces, p_payloads) WITH ORDINALITY u(type, actor, trace, payload, i);
  FOR i IN 1 .. v_n LOOP
    v_prevs[i] := v_hash;
    v_hash := encode(sha256(convert_to(v_before[i] || v_hash || v_behind[i], 'UTF8')), 'hex');
    v_hashes[i] := v_hash;
  END LOOP;
  INSERT INTO ledger (seq, at, type, actor, trace_id, payload, prev_hash, hash)
    SELECT v_seq + u.i, t, u.type, u.actor, u.trace, u.payload, u.prev, u.hash
    FROM unnest(p_types, p_actors, p_traces, p_payloads, v_prevs, v_hashes) WITH ORDINALITY u(type, actor, trace,
        payload, prev, hash, i);
  UPDATE ledger_head h SET seq = v_seq + v_n, hash = v_hash;
  RETURN v_seq + v_n;
END $$;

-- Looks at the p_rows rows behind p_after, whose hash is p_prev: how many there are, the last of them, and the first
-- that is not what it has to be, or is not there. What cannot be decided (a NULL where none may be) is not what it has
-- to be.
CREATE OR REPLACE FUNCTION ledger_check(
  p_after bigint, p_prev text, p_rows int
) RETURNS TABLE (seen bigint, last_seq bigint, last_hash text, broken_at bigint)
  LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT count(*), max(y.seq), (array_agg(y.hash ORDER BY y.seq DESC))[1],
    min(least(y.seq, y.due)) FILTER (WHERE y.ok IS NOT TRUE)
  FROM (
    SELECT x.seq, x.hash, lag(x.seq, 1, p_after) OVER w + 1 AS due,
      x.seq = lag(x.seq, 1, p_after) OVER w + 1 AND x.prev_hash = lag(x.hash, 1, p_prev) OVER w
        AND x.hash = encode(sha256(convert_to(ledger_form_before(ledger_time(x.at), x.actor, x.payload)
                || x.prev_hash || ledger_form_behind(x.seq, x.type, x.trace_id), 'UTF8')), 'hex') AS ok
    FROM (SELECT l.* FROM ledger l WHERE l.seq > p_after ORDER BY l.seq LIMIT p_rows) x
    WINDOW w AS (ORDER BY x.seq)
  ) y
$$;
`,
    },
    {
      name: 'pause',
      sql: `-- Pauses of a queue, a lane or a type. A pause parks lanes as they become ready; resume puts them back.

-- While anything is paused, a transaction that may park a lane for it blocks resume until it has committed: a lane
-- parked just after its queue was resumed would be forgotten. Before any other lock.
--
-- A transaction that found no pause may see one later, and does not park for it, because resume would not wait for it:
-- its lanes become ready, and the process that claims them parks them. The setting remembers what was found.
CREATE OR REPLACE FUNCTION pause_guard() RETURNS boolean
  LANGUAGE plpgsql AS $$
BEGIN
  IF NOT EXISTS (SELECT FROM pauses) THEN RETURN false; END IF;
  PERFORM pg_advisory_xact_lock_shared(hashtext('spillway.pauses'), hashtext(current_schema()));
  PERFORM set_config('spillway.pause_guard', 'held', true);
  RETURN EXISTS (SELECT FROM pauses);
END $$;

-- Is this lane held back by an operator, and may this transaction park it for that?
CREATE OR REPLACE FUNCTION lane_paused(p_lane uuid) RETURNS boolean
  LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT current_setting('spillway.pause_guard', true) = 'held'
    AND EXISTS (SELECT FROM lanes l JOIN pauses p ON CASE WHEN p.queue = ''
      THEN p.partition = (SELECT x.type FROM ops x WHERE x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1)
      ELSE p.queue = l.queue AND (p.partition IS NULL OR p.partition = l.partition) END WHERE l.id = p_lane)
$$;

CREATE OR REPLACE FUNCTION pause(p_queue text, p_partition text) RETURNS void
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  INSERT INTO pauses (queue, partition, since) VALUES (p_queue, p_partition, clock()) ON CONFLICT DO NOTHING
$$;

-- Resuming a queue ends the pauses of its single lanes too. All its lanes go on at once, by priority as ever.
CREATE OR REPLACE FUNCTION resume(p_queue text, p_partition text) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_lane uuid; v_keys uuid[];
BEGIN
  PERFORM pg_advisory_xact_lock(hashtext('spillway.pauses'), hashtext(current_schema()));
  PERFORM set_config('spillway.pause_guard', 'held', true);
  DELETE FROM pauses p WHERE p.queue = p_queue AND (p_partition IS NULL OR p.partition = p_partition);
  v_keys := ARRAY(SELECT k.key FROM turns k WHERE k.key IN (
      SELECT x.key FROM parked x WHERE x.reason = 'pause' AND x.key IS NOT NULL) ORDER BY k.key FOR UPDATE);
  FOR v_lane IN
    WITH held AS (
      SELECT x.lane FROM parked x JOIN lanes l ON l.id = x.lane
      WHERE x.reason = 'pause'
        AND (p_queue = '' OR l.queue = p_queue AND (p_partition IS NULL OR l.partition = p_partition))
        ORDER BY x.lane FOR UPDATE OF x
    )
    DELETE FROM parked x USING held h WHERE x.lane = h.lane RETURNING x.lane
  LOOP
    -- Back here if another pause still holds it.
    PERFORM lane_requeue(v_lane);
  END LOOP;
  IF cardinality(v_keys) > 0 THEN PERFORM turns_next(v_keys); END IF;
END $$;

-- A step of accept. Which lanes' first items may run now: not those that are paused. Per item the number of its lane,
-- its number in the lane (1: the first) and its type.
CREATE OR REPLACE FUNCTION pauses_check(
  p_queues text[], p_partitions text[], p_may_run boolean[], p_lane int[], p_rn bigint[], p_types text[]
) RETURNS boolean[]
  LANGUAGE sql STABLE AS $$
  SELECT array_agg(u.may_run AND NOT EXISTS (SELECT FROM pauses s WHERE CASE WHEN s.queue = '' THEN s.partition = f.type
      ELSE s.queue = u.queue AND (s.partition IS NULL OR s.partition = u.partition) END) ORDER BY u.i)
  FROM unnest(p_queues, p_partitions, p_may_run) WITH ORDINALITY u(queue, partition, may_run, i)
  JOIN unnest(p_lane, p_rn, p_types) f(lane, rn, type) ON f.lane = u.i AND f.rn = 1
$$;
`,
    },
    {
      name: 'permits',
      sql: `-- Permits of a pool, counted per process: a process that dies gives back what it held.

-- Gives permits back, then takes permits. For each that it takes: 'granted', 'identity_full' or 'pool_full'. One row
-- lock per pool makes it exact; permits of processes that are gone do not count.
-- p_seq grows with each call. A call whose answer was lost may have run, or may still run: the next call lists in
-- p_held all that the process holds, and the late call finds that it is late (NULL).
CREATE OR REPLACE FUNCTION permits_change(
  p_worker uuid, p_pool text, p_seq bigint, p_held text[], p_counts int[], p_gives text[], p_takes text[],
  p_each int[], p_all int[]
) RETURNS text[]
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_out text[] := '{}'; v_total bigint; v_mine bigint; r record;
BEGIN
  INSERT INTO connection_pools (pool) VALUES (p_pool) ON CONFLICT DO NOTHING;
  PERFORM FROM connection_pools x WHERE x.pool = p_pool FOR UPDATE;
  PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
  IF NOT FOUND THEN RAISE EXCEPTION 'process % is not enlisted', p_worker USING ERRCODE = '55000'; END IF;
  INSERT INTO connection_writers AS x (pool, worker, seq) VALUES (p_pool, p_worker, p_seq)
    ON CONFLICT (pool, worker) DO UPDATE SET seq = excluded.seq WHERE x.seq < excluded.seq;
  IF NOT FOUND THEN RETURN NULL; END IF;
  IF p_held IS NOT NULL THEN
    DELETE FROM connections c WHERE c.pool = p_pool AND c.worker = p_worker AND NOT c.identity = ANY (p_held);
    INSERT INTO connections AS c (pool, identity, worker, held) SELECT p_pool, u.who, p_worker, u.n
      FROM unnest(p_held, p_counts) u(who, n)
      ON CONFLICT (pool, identity, worker) DO UPDATE SET held = excluded.held;
  END IF;
  FOR r IN SELECT u.who, count(*)::int AS n FROM unnest(p_gives) u(who) GROUP BY u.who LOOP
    DELETE FROM connections c WHERE c.pool = p_pool AND c.identity = r.who AND c.worker = p_worker AND c.held <= r.n;
    CONTINUE WHEN FOUND;
    UPDATE connections c SET held = c.held - r.n WHERE c.pool = p_pool AND c.identity = r.who AND c.worker = p_worker;
  END LOOP;
  IF cardinality(p_takes) = 0 THEN RETURN v_out; END IF;
  SELECT coalesce(sum(c.held), 0) INTO v_total FROM connections c JOIN workers w ON w.id = c.worker
    WHERE c.pool = p_pool;
  FOR r IN SELECT u.who, u.each_max, u.all_max
    FROM unnest(p_takes, p_each, p_all) WITH ORDINALITY u(who, each_max, all_max, i) ORDER BY u.i LOOP
    SELECT coalesce(sum(c.held), 0) INTO v_mine FROM connections c JOIN workers w ON w.id = c.worker
      WHERE c.pool = p_pool AND c.identity = r.who;
    IF v_mine >= r.each_max THEN
      v_out := v_out || 'identity_full'::text;
    ELSIF v_total >= r.all_max THEN
      v_out := v_out || 'pool_full'::text;
    ELSE
      INSERT INTO connections AS c (pool, identity, worker, held) VALUES (p_pool, r.who, p_worker, 1)
        ON CONFLICT (pool, identity, worker) DO UPDATE SET held = c.held + 1;
      v_total := v_total + 1;
      v_out := v_out || 'granted'::text;
    END IF;
  END LOOP;
  RETURN v_out;
END $$;

-- The name and the numbers that the release before (0.2.0) uses; to be removed after the next release.
CREATE OR REPLACE FUNCTION connections_change(
  p_worker uuid, p_pool text, p_seq bigint, p_held text[], p_counts int[], p_gives text[], p_takes text[],
  p_each int[], p_all int[]
) RETURNS smallint[]
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT CASE WHEN o.outcomes IS NOT NULL THEN ARRAY(
      SELECT (array_position(ARRAY['granted', 'identity_full', 'pool_full'], u.outcome) - 1)::smallint
      FROM unnest(o.outcomes) WITH ORDINALITY u(outcome, i) ORDER BY u.i) END
    FROM permits_change(p_worker, p_pool, p_seq, p_held, p_counts, p_gives, p_takes, p_each, p_all) o(outcomes)
$$;
`,
    },
    {
      name: 'progress',
      sql: `-- Progress of running operations (tables/0008-progress.sql): written for all of a process at once, and removed with the
-- attempts that ended.

CREATE OR REPLACE FUNCTION progress_keep(
  p_ids uuid[], p_attempts int[], p_values real[], p_notes text[], p_ended uuid[]
) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  INSERT INTO progress AS p (id, attempt, value, note, at, sweep_at)
    SELECT u.id, u.attempt, u.value, u.note, t, t + interval '1 hour'
    FROM unnest(p_ids, p_attempts, p_values, p_notes) u(id, attempt, value, note) ORDER BY u.id
    -- A process that lost the operation may still have something to say of its own attempt.
    ON CONFLICT (id) DO UPDATE SET attempt = excluded.attempt, value = excluded.value, note = excluded.note, at = t
      WHERE p.attempt <= excluded.attempt;
  DELETE FROM progress p WHERE p.id = ANY (p_ended);
END $$;

-- Rows of processes that died. Returns how many went, and whether there may be more.
CREATE OR REPLACE FUNCTION progress_sweep(p_rows int, OUT progress int, OUT is_full boolean)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_looked int;
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  WITH old AS MATERIALIZED (
    SELECT x.ctid AS at, EXISTS (SELECT FROM ops o WHERE o.id = x.id) AS is_needed
    FROM progress x WHERE x.sweep_at < t ORDER BY x.sweep_at LIMIT p_rows FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM progress d WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o WHERE NOT o.is_needed)) RETURNING 1
  ), kept AS (
    UPDATE progress d SET sweep_at = t + interval '1 hour'
      WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o WHERE o.is_needed))
  ) SELECT (SELECT count(*) FROM gone), count(*) INTO progress, v_looked FROM old o;
  is_full := v_looked >= p_rows;
END $$;
`,
    },
    {
      name: 'pulse',
      sql: `-- A process announces itself (enlist), then sends one heartbeat a second, which returns what it has to know about the
-- others. space_check fails if the disk is full.

CREATE OR REPLACE FUNCTION enlist(p_worker uuid, p_name text, p_lease_ms bigint, p_announced jsonb) RETURNS void
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  INSERT INTO workers (id, name, started_at, until, announced)
    VALUES (p_worker, p_name, clock(), clock() + p_lease_ms * interval '1 ms', p_announced)
$$;

-- One call a second per process: heartbeat, and all a process has to know of the others.
CREATE OR REPLACE FUNCTION pulse(
  p_worker uuid, p_lease_ms bigint, p_running json
)
RETURNS TABLE ( alive boolean, now_ms double precision, waiting boolean, next_due_ms bigint, oldest_ms bigint,
    held json, running json, gates json, halts json, cancels json, lost int )
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  UPDATE workers w SET until = t + p_lease_ms * interval '1 ms', running = p_running WHERE w.id = p_worker;
  alive := FOUND;
  now_ms := extract(epoch FROM t) * 1000;
  waiting := EXISTS (SELECT FROM ready x);
  -- No min(): greatest(0, NULL) is 0, which would say that something is due.
  next_due_ms := (SELECT greatest(0, date_part('epoch', p.until - t) * 1000)::bigint FROM parked p
      WHERE p.until < 'infinity' ORDER BY p.until LIMIT 1);
  oldest_ms := coalesce((SELECT (extract(epoch FROM t - o.accepted_at) * 1000)::bigint FROM ops o ORDER BY o.id
        LIMIT 1), 0);
  held := (SELECT json_object_agg(x.type, x.n) FROM (SELECT y.type, sum(y.n) AS n FROM tallies y GROUP BY y.type) x);
  running := (SELECT json_object_agg(x.type, x.n)
      FROM (SELECT e.key AS type, sum(e.value::int) AS n FROM workers w, json_each_text(w.running) e GROUP BY e.key) x);
  gates := (SELECT json_agg(json_build_object('name', g.name, 'held', g.held, 'full_at', g.full_at, 'overflowing',
          g.overflowing)) FROM gates g);
  halts := (SELECT json_agg(json_build_object('scope', h.scope, 'reason', h.reason)) FROM halts h);
  cancels := (SELECT json_agg(c.id) FROM cancels c);
  lost := (SELECT count(*) FROM workers w WHERE w.until < t);
  RETURN NEXT;
END $$;

-- Fails when the disk is full (53100). Updating a row does not: there is room in its page, and in the log. Growing a
-- file does, so 1 MB, which is more than the statement may keep in memory, goes to a file that is gone afterwards:
-- about 1 ms.
CREATE OR REPLACE FUNCTION space_check() RETURNS void
  LANGUAGE plpgsql SET work_mem = '64kB' SET temp_tablespaces = '' AS $$
DECLARE
  v_count bigint;
BEGIN
  WITH x AS MATERIALIZED (SELECT repeat('x', 8000) FROM generate_series(1, 128)) SELECT count(*) FROM x INTO v_count;
EXCEPTION WHEN configuration_limit_exceeded THEN
  -- temp_file_limit is below that: nothing can be said of the disk.
  NULL;
END $$;
`,
    },
    {
      name: 'rates',
      sql: `-- Rates: at most a given number per key in a sliding window. One row per key with its buckets side by side, so that one
-- row lock makes the count exact.
--
-- A bucket is known by the time at which it ends. It counts until the window has passed since then, so everything in it
-- counts for the whole window and for at most the bucket's width longer: the limit holds in any window, wherever that
-- begins. Ends do not move, so the reported wait stays true. Buckets store running sums: neither counting nor removing
-- walks over them, and width_bucket finds a bucket by bisection.
--
-- Windows (p_rate_minutes of accept and admit) below zero are seconds: any window of that length, with buckets of a
-- 60th of it. Above zero they are minutes: as many buckets of a clock minute count, the present one included. The
-- petitions count so, and release 0.2.0 knows only these; its calls and ours share rows during an upgrade.
--
-- rates_asked, rates_take, rates_return and rates_status are called by gates_take and run with the settings of accept.
-- The functions at the end are single expressions, which the planner puts in place: calling one would cost more than
-- the count.

-- How often each key is asked for by items that are not decided.
CREATE OR REPLACE FUNCTION rates_asked(p_ix int[], p_item int[], p_decided text[], p_keys int) RETURNS int[]
  LANGUAGE sql STABLE AS $$
  SELECT array_agg(coalesce(x.n, 0)::int ORDER BY k.i) FROM generate_series(1, p_keys) k(i)
    LEFT JOIN (SELECT u.ix, count(*) AS n FROM unnest(p_ix, p_item) WITH ORDINALITY u(ix, item, i)
      WHERE p_decided[coalesce(u.item, u.i)] IS NULL GROUP BY u.ix) x ON x.ix = k.i
$$;

-- Adds what is asked for, in key order; what does not fit is taken back by rates_return. left_now: how many fitted
-- before. waits_ms: when the next slot is free, that is when the oldest bucket leaves. is_odd: that has to be computed
-- from all buckets, because refunds emptied the oldest one, or because rows keep more than the window of this process.
CREATE OR REPLACE FUNCTION rates_take(
  p_keys uuid[], p_asked int[], p_limits int[], p_windows int[], p_keep int[], p_at timestamptz,
  OUT left_now int[], OUT waits_ms bigint[], OUT is_tight boolean, OUT is_odd boolean
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_now bigint := floor(extract(epoch FROM p_at) * 1000);
  v_longer boolean;
BEGIN
  WITH up AS (
    INSERT INTO rates AS x (key, ends, sums, span_ms, expires_at, sweep_at)
    SELECT k.key, ARRAY[0, (v_now / rate_width_ms(k.win) + 1) * rate_width_ms(k.win)], ARRAY[0, k.n],
      rate_window_ms(k.win), p_at + k.keep * interval '1 minute', p_at + k.keep * interval '1 minute'
    FROM unnest(p_keys, p_asked, p_windows, p_keep) k(key, n, win, keep)
    ON CONFLICT (key) DO UPDATE SET
      -- From the last bucket that is over, which is the base now. The last bucket takes more while it ends no earlier
      -- than ours would: later with a clock that went back, or a wider bucket of another process.
      ends = x.ends[width_bucket(v_now - greatest(x.span_ms, excluded.span_ms), x.ends):]
        || CASE WHEN x.ends[cardinality(x.ends)] >= excluded.ends[2] THEN '{}' ELSE excluded.ends[2:] END,
      sums = x.sums[width_bucket(v_now - greatest(x.span_ms, excluded.span_ms), x.ends):cardinality(x.sums)
          - CASE WHEN x.ends[cardinality(x.ends)] >= excluded.ends[2] THEN 1 ELSE 0 END]
        || (x.sums[cardinality(x.sums)] + excluded.sums[2]),
      -- Instances whose windows differ count in the same rows: the longest one decides, while its counts are kept.
      span_ms = greatest(excluded.span_ms, least(x.span_ms,
          (date_part('epoch', greatest(x.expires_at, excluded.expires_at) - p_at) * 1000)::bigint)),
      expires_at = greatest(x.expires_at, excluded.expires_at)
    RETURNING x.sums[cardinality(x.sums)] - x.sums[1] AS used, x.ends[2] AS first, x.sums[2] - x.sums[1] AS first_n
  ), seen AS (
    SELECT array_agg(up.used) AS used, array_agg(up.first) AS firsts, array_agg(up.first_n) AS first_ns FROM up
  )
  SELECT array_agg(u.most - (u.used - u.asked)), coalesce(bool_or(u.used > u.most), false), bool_or(u.first_n = 0),
      bool_or(u.first <= v_now - u.win), array_agg(greatest(1, u.first + u.win - v_now))
    INTO left_now, is_tight, is_odd, v_longer, waits_ms
    FROM (
      SELECT s.used, s.asked, s.most, rate_window_ms(s.win) AS win, s.first, s.first_n
      FROM seen, unnest(seen.used, p_asked, p_limits, p_windows, seen.firsts, seen.first_ns)
        s(used, asked, most, win, first, first_n)
    ) u;
  IF v_longer THEN
    -- Only what is in the window of this process counts here.
    is_odd := true;
    SELECT array_agg(u.most - (k.used - u.asked) ORDER BY u.i), bool_or(k.used > u.most) INTO left_now, is_tight
      FROM unnest(p_keys, p_asked, p_limits, p_windows) WITH ORDINALITY u(key, asked, most, win, i)
      JOIN rates x ON x.key = u.key,
        LATERAL (SELECT rate_sum_since(x.ends, x.sums, v_now - rate_window_ms(u.win))) k(used);
  END IF;
END $$;

-- Takes back what was asked for and not given.
CREATE OR REPLACE FUNCTION rates_return(p_keys uuid[], p_asked int[], p_gave int[]) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE rates x SET sums = x.sums[1:cardinality(x.sums) - 1] || (x.sums[cardinality(x.sums)] - u.back)
    FROM unnest(p_keys, p_asked, p_gave) k(key, asked, gave), LATERAL (SELECT k.asked - k.gave) u(back)
    WHERE x.key = k.key AND u.back > 0;
END $$;

-- Per key the milliseconds until a slot is free, from all buckets. A slot is free when fewer than the limit count;
-- after the limit was lowered more may count than it allows. The bucket that has to leave is the first whose sum is
-- at least that of all buckets without what may stay.
CREATE OR REPLACE FUNCTION rates_waits(p_keys uuid[], p_limits int[], p_windows int[], p_at timestamptz)
  RETURNS bigint[]
  LANGUAGE sql STABLE AS $$
  SELECT array_agg(CASE WHEN b.used = 0 THEN 1
      ELSE greatest(1, x.ends[1 + width_bucket(
          x.sums[cardinality(x.sums)] - greatest(1, least(u.most, b.used)), x.sums)]
        + rate_window_ms(u.win) - t.now) END ORDER BY u.i)
  FROM (SELECT floor(extract(epoch FROM p_at) * 1000)::bigint) t(now),
    unnest(p_keys, p_windows, p_limits) WITH ORDINALITY u(key, win, most, i) JOIN rates x ON x.key = u.key,
    LATERAL (SELECT rate_sum_since(x.ends, x.sums, t.now - rate_window_ms(u.win)) AS used) b
$$;

-- Per item the tier that matters. Of a refused item, among the tiers that are used up, the one that frees last (it says
-- when to come back); of an admitted one the tier with the least left.
CREATE OR REPLACE FUNCTION rates_status(
  p_ix int[], p_item int[], p_items int, p_verdicts text[], p_left int[], p_gave int[], p_waits_ms bigint[],
  OUT tiers int[], OUT rates_left bigint[], OUT rates_reset_ms bigint[]
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  r record;
BEGIN
  IF cardinality(p_item) = 0 THEN
    SELECT array_agg(u.i), array_agg(greatest(0, p_left[u.ix] - p_gave[u.ix])), array_agg(p_waits_ms[u.ix])
      INTO tiers, rates_left, rates_reset_ms FROM unnest(p_ix) WITH ORDINALITY u(ix, i);
    RETURN;
  END IF;
  tiers := array_fill(NULL::int, ARRAY[p_items]);
  rates_left := array_fill(NULL::bigint, ARRAY[p_items]);
  rates_reset_ms := array_fill(NULL::bigint, ARRAY[p_items]);
  FOR r IN SELECT DISTINCT ON (u.item) u.item, u.i AS tier, greatest(0, k.left_now) AS left_now, k.wait
      FROM unnest(p_item, p_ix) WITH ORDINALITY u(item, ix, i),
        LATERAL (SELECT p_left[u.ix] - p_gave[u.ix] AS left_now, p_waits_ms[u.ix] AS wait) k
      ORDER BY u.item, least(1, greatest(0, k.left_now)),
        CASE WHEN p_verdicts[u.item] = 'rate_limited' THEN - k.wait END, k.left_now, u.i LOOP
    tiers[r.item] := r.tier; rates_left[r.item] := r.left_now; rates_reset_ms[r.item] := r.wait;
  END LOOP;
END $$;

-- How long a bucket counts after its end; a clock minute counts from its beginning on. Both functions choose by
-- greatest, because the value of the other kind is below zero, and CASE costs more.
CREATE OR REPLACE FUNCTION rate_window_ms(p_window int) RETURNS bigint
  LANGUAGE sql IMMUTABLE AS $$
  SELECT greatest((p_window - 1) * 60000::bigint, p_window * -1000::bigint)
$$;

CREATE OR REPLACE FUNCTION rate_width_ms(p_window int) RETURNS bigint
  LANGUAGE sql IMMUTABLE AS $$
  SELECT greatest(least(p_window, 1) * 60000::bigint, p_window * -50::bigint / 3)
$$;

-- What is in the buckets that end after p_since.
CREATE OR REPLACE FUNCTION rate_sum_since(p_ends bigint[], p_sums bigint[], p_since bigint) RETURNS bigint
  LANGUAGE sql IMMUTABLE AS $$
  SELECT p_sums[cardinality(p_sums)] - p_sums[greatest(1, width_bucket(p_since, p_ends))]
$$;
`,
    },
    {
      name: 'recover',
      sql: `-- Returns the lanes of leases that end without a settlement: of a process that died, one that stops, or one that never
-- got the answer to its claim.
--
-- Counting deliveries after a crash: a claim hands out several operations, and only one per lane can have killed the
-- process. The first one is charged if it surely ran, that is if its start was recorded (mark). Otherwise none is
-- charged, and the lane is claimed one operation at a time (careful), each marked before it runs, until the suspects
-- are through. An operation that kills its process every time becomes a dead letter, and its neighbours are not
-- charged for it.

-- Takes one operation out of its lane for good. The caller holds the locks of the lane and of its key, and has given
-- back the lane's permit.
CREATE OR REPLACE FUNCTION bury(p_lane uuid, p_seq bigint, p_error text) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  WITH gone AS (DELETE FROM ops o WHERE o.lane = p_lane AND o.seq = p_seq RETURNING o.*)
  INSERT INTO dead_letters (id, died_at, lane, seq, queue, partition, type, priority, identity, payload, accepted_at,
      started_at, attempts, max_attempts, timeout_ms, error, trace, gate, key, most)
  SELECT g.id, t, g.lane, g.seq, l.queue, l.partition, g.type, g.priority, g.identity, g.payload, g.accepted_at,
    g.started_at, g.attempts, g.max_attempts, g.timeout_ms, p_error, g.trace, g.gate, l.key,
    (SELECT k.most FROM turns k WHERE k.key = l.key)
  FROM gone g JOIN lanes l ON l.id = g.lane;
  UPDATE lanes l SET head = greatest(l.head, p_seq), depth = l.depth - 1, moved_at = t WHERE l.id = p_lane;
  UPDATE turns k SET lanes = k.lanes - 1 FROM lanes l WHERE l.id = p_lane AND k.key = l.key;
  PERFORM lanes_drop(ARRAY[p_lane]);
END $$;

-- Gives back the lanes of leases that end without a settlement. p_charge: did a process die over them?
CREATE OR REPLACE FUNCTION leases_return(p_fences bigint[], p_charge boolean) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  r record; o record;
  v_lanes uuid[]; v_uptos bigint[]; v_n int := 0; v_keys uuid[];
BEGIN
  PERFORM pause_guard();
  WITH ended AS (DELETE FROM leases l WHERE l.fence = ANY (p_fences) RETURNING l.lanes, l.uptos)
  SELECT array_agg(z.lane ORDER BY z.lane), array_agg(z.upto ORDER BY z.lane) INTO v_lanes, v_uptos
    FROM ended e, unnest(e.lanes, e.uptos) z(lane, upto);
  IF v_lanes IS NULL THEN RETURN 0; END IF;
  IF p_charge THEN
    -- Keys and gates of what will be buried come before the lanes in the lock order.
    PERFORM FROM idempotency d WHERE d.key IN (
      SELECT x.idem FROM unnest(v_lanes) u(id) JOIN lanes l ON l.id = u.id, LATERAL (
        SELECT y.idem, y.attempts, y.max_attempts FROM ops y WHERE y.lane = l.id AND y.seq > l.head ORDER BY y.seq
          LIMIT 1) x
      WHERE x.idem IS NOT NULL AND x.attempts + 1 >= x.max_attempts) ORDER BY d.key FOR UPDATE;
    PERFORM FROM gates g WHERE g.name IN (
      SELECT x.gate FROM unnest(v_lanes) u(id) JOIN lanes l ON l.id = u.id, LATERAL (
        SELECT y.gate FROM ops y WHERE y.lane = l.id AND y.seq > l.head ORDER BY y.seq LIMIT 1) x
      WHERE x.gate IS NOT NULL) ORDER BY g.name FOR UPDATE;
  END IF;
  PERFORM FROM lanes l WHERE l.id = ANY (v_lanes) ORDER BY l.id FOR UPDATE;
  PERFORM turns_lock(v_lanes);
  WITH given AS (
    UPDATE turns k SET running = k.running - g.n
      FROM (SELECT l.key, count(*) AS n FROM lanes l WHERE l.id = ANY (v_lanes) AND l.key IS NOT NULL GROUP BY l.key) g
      WHERE k.key = g.key RETURNING k.key
  ) SELECT array_agg(g.key) INTO v_keys FROM given g;
  FOR r IN SELECT u.lane, u.upto FROM unnest(v_lanes, v_uptos) u(lane, upto) ORDER BY u.lane LOOP
    v_n := v_n + 1;
    UPDATE lanes l SET running = false WHERE l.id = r.lane;
    IF p_charge THEN
      SELECT x.seq, x.id, x.type, x.started_at, x.attempts, x.max_attempts, x.idem, x.gate INTO o FROM lanes l, ops x
        WHERE l.id = r.lane AND x.lane = l.id AND x.seq > l.head AND x.seq <= r.upto ORDER BY x.seq LIMIT 1;
      IF FOUND AND o.started_at IS NOT NULL THEN
        UPDATE ops x SET attempts = x.attempts + 1, started_at = NULL, error = 'The process that ran it was lost'
          WHERE x.lane = r.lane AND x.seq = o.seq;
        IF o.attempts + 1 >= o.max_attempts THEN
          IF o.idem IS NOT NULL THEN
            UPDATE idempotency d
              SET answer = json_build_object('v', 'failed', 'error', 'The process that ran it was lost')
                WHERE d.key = o.idem AND d.op = o.id AND d.answer IS NULL;
          END IF;
          IF o.gate IS NOT NULL THEN PERFORM gates_release(ARRAY[o.gate], ARRAY[1::bigint]); END IF;
          PERFORM bury(r.lane, o.seq, 'The process that ran it was lost, ' || (o.attempts + 1) || ' times');
          PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, o.type, -1);
          PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, '!dead', 1);
        END IF;
      END IF;
      UPDATE lanes l SET careful = greatest(l.careful, r.upto) WHERE l.id = r.lane;
    END IF;
    UPDATE ops x SET started_at = NULL FROM lanes l
      WHERE l.id = r.lane AND x.lane = l.id AND x.seq > l.head AND x.seq <= r.upto AND x.started_at IS NOT NULL;
    PERFORM lane_requeue(r.lane);
  END LOOP;
  IF v_keys IS NOT NULL THEN PERFORM turns_next(v_keys); END IF;
  RETURN v_n;
END $$;

-- Ends a process that has not been heard of: its leases are void from here on. One per call, so that the lanes' locks
-- are taken in order.
CREATE OR REPLACE FUNCTION recover() RETURNS TABLE (worker uuid, name text, lanes int)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  w record;
BEGIN
  PERFORM pause_guard();
  FOR w IN SELECT x.id, x.name FROM workers x WHERE x.until < t ORDER BY x.until LIMIT 1 FOR UPDATE SKIP LOCKED LOOP
    worker := w.id; name := w.name;
    lanes := leases_return((SELECT coalesce(array_agg(l.fence), '{}') FROM leases l WHERE l.worker = w.id), true);
    PERFORM worker_forget(w.id);
    RETURN NEXT;
  END LOOP;
END $$;

CREATE OR REPLACE FUNCTION worker_forget(p_worker uuid) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  -- Before what it holds, in the order of everyone who changes that: otherwise two processes deadlock, or a permit is
  -- left behind.
  PERFORM FROM workers x WHERE x.id = p_worker FOR UPDATE;
  -- What was left to this process alone is for all again.
  UPDATE ready x SET type = split_part(x.type, ' ', 1)
    WHERE x.type IN (SELECT jsonb_object_keys(w.announced) FROM workers w WHERE w.id = p_worker)
      AND NOT EXISTS (SELECT FROM workers w WHERE w.id <> p_worker AND w.announced ? x.type);
  WITH gone AS (DELETE FROM tallies x WHERE x.worker = p_worker RETURNING x.type, x.n)
  INSERT INTO tallies (worker, part, type, n)
    SELECT '00000000-0000-0000-0000-000000000000', -1, g.type, sum(g.n) FROM gone g GROUP BY g.type
      HAVING sum(g.n) <> 0;
  DELETE FROM connections x WHERE x.worker = p_worker;
  DELETE FROM connection_writers x WHERE x.worker = p_worker;
  DELETE FROM workers x WHERE x.id = p_worker;
END $$;

-- A process that stops by itself: what it still holds was not run and is not charged.
CREATE OR REPLACE FUNCTION retire(p_worker uuid) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  v_n int;
BEGIN
  PERFORM FROM workers x WHERE x.id = p_worker FOR UPDATE;
  v_n := leases_return((SELECT coalesce(array_agg(l.fence), '{}') FROM leases l WHERE l.worker = p_worker), false);
  PERFORM worker_forget(p_worker);
  RETURN v_n;
END $$;

-- Leases that this process does not know of: it claimed them, but the answer never reached it. Younger ones may
-- belong to a call that is still under way; no call lasts that long.
CREATE OR REPLACE FUNCTION disown(p_worker uuid, p_known bigint[]) RETURNS int
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT leases_return((SELECT coalesce(array_agg(l.fence), '{}') FROM leases l
    WHERE l.worker = p_worker AND NOT l.fence = ANY (p_known) AND l.claimed_at < clock() - interval '12 seconds'),
    false)
$$;
`,
    },
    {
      name: 'redrive',
      sql: `-- Dead letters: back into their lanes, or removed.

-- Dead letters join the tail of their lanes again, in the order in which they were accepted, with all their attempts.
-- Those whose capacity gate is full stay where they are.
CREATE OR REPLACE FUNCTION redrive(p_ids uuid[]) RETURNS TABLE (moved int, skipped int)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  d record; g record;
  v_depth bigint; v_tail bigint; v_stamp bigint;
BEGIN
  PERFORM pause_guard();
  moved := 0; skipped := 0;
  PERFORM FROM dead_letters x WHERE x.id = ANY (p_ids) ORDER BY x.id FOR UPDATE;
  PERFORM FROM gates x WHERE x.name IN (SELECT y.gate FROM dead_letters y WHERE y.id = ANY (p_ids))
    ORDER BY x.name FOR UPDATE;
  -- Those with keys last: a key's lock comes after those of all lanes.
  FOR d IN SELECT x.* FROM dead_letters x WHERE x.id = ANY (p_ids) ORDER BY x.key NULLS FIRST, x.lane, x.seq LOOP
    IF d.gate IS NOT NULL THEN
      UPDATE gates x SET held = x.held + 1, overflowing = x.held + 1 >= x.full_at
        WHERE x.name = d.gate AND NOT x.overflowing AND x.held < x.full_at;
      IF NOT FOUND THEN
        skipped := skipped + 1;
        CONTINUE;
      END IF;
    END IF;
    INSERT INTO lanes AS l (id, queue, partition, tail, depth, moved_at, sweep_at, alone, key, turn)
      VALUES (d.lane, d.queue, d.partition, 1, 1, t, t + interval '1 hour', d.lane = d.id, d.key,
        CASE WHEN d.key IS NOT NULL THEN nextval('turn_numbers') END)
      ON CONFLICT (id) DO UPDATE SET tail = l.tail + 1, depth = l.depth + 1,
        moved_at = CASE WHEN l.depth = 0 THEN t ELSE l.moved_at END
      RETURNING l.depth, l.tail INTO v_depth, v_tail;
    v_stamp := coalesce((SELECT x.stamp FROM ready x WHERE x.priority = d.priority ORDER BY x.stamp
          LIMIT 1), (SELECT s.last_value FROM stamps s));
    INSERT INTO ops (lane, seq, id, type, priority, stamp, identity, payload, accepted_at, max_attempts, timeout_ms,
        trace, gate)
      VALUES (d.lane, v_tail, d.id, d.type, d.priority, v_stamp, d.identity, d.payload, d.accepted_at,
          d.max_attempts, d.timeout_ms, d.trace, d.gate);
    IF d.key IS NOT NULL THEN
      INSERT INTO turns AS k (key, queue, partition, most, lanes) VALUES (d.key, d.queue, d.partition, d.most, 1)
        ON CONFLICT (key) DO UPDATE SET lanes = k.lanes + 1;
    END IF;
    IF v_depth = 1 THEN PERFORM lane_requeue(d.lane); END IF;
    IF d.key IS NOT NULL THEN PERFORM turns_next(ARRAY[d.key]); END IF;
    DELETE FROM dead_letters x WHERE x.id = d.id;
    DELETE FROM cancels x WHERE x.id = d.id;
    PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, d.type, 1);
    moved := moved + 1;
  END LOOP;
  PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, '!dead', - moved) WHERE moved > 0;
  RETURN NEXT;
END $$;

CREATE OR REPLACE FUNCTION purge(p_ids uuid[]) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  v_n int;
BEGIN
  DELETE FROM dead_letters x WHERE x.id = ANY (p_ids);
  GET DIAGNOSTICS v_n = ROW_COUNT;
  PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, '!dead', - v_n) WHERE v_n > 0;
  RETURN v_n;
END $$;
`,
    },
    {
      name: 'schedules',
      sql: `-- Recurring work. The processes know what a schedule means and when it is due next; the row says what was handled. A
-- process that finds a due row locks it, queues the operation and moves next_at in one transaction: once per due time,
-- whatever processes there are and whenever they die. The store's clock decides what is due.
--
-- The text and the type of the process that registered last are in the row. A process with others (an older release,
-- during a deploy) leaves the row alone.

-- p_next: computed from the store's clock, and after the last due time that was handled, so that a due time which both
-- texts have is handled once. What is due already stays due. False: another process has the row just now, perhaps one
-- that hangs; waiting for it would hold up the heartbeat's tasks.
CREATE OR REPLACE FUNCTION schedule_put(
  p_name text, p_cron text, p_timezone text, p_type text, p_next timestamptz
) RETURNS boolean
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  t timestamptz := clock();
BEGIN
  INSERT INTO schedules (name, cron, timezone, type, next_at, seen_at)
    VALUES (p_name, p_cron, p_timezone, p_type, p_next, t) ON CONFLICT (name) DO NOTHING;
  IF FOUND THEN
    RETURN true;
  END IF;
  PERFORM FROM schedules s WHERE s.name = p_name FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    -- With our text, the other process keeps it.
    RETURN EXISTS (SELECT FROM schedules s
        WHERE s.name = p_name AND s.cron = p_cron AND s.timezone = p_timezone AND s.type = p_type);
  END IF;
  UPDATE schedules s SET cron = p_cron, timezone = p_timezone, type = p_type, seen_at = t,
      next_at = CASE WHEN (s.cron = p_cron AND s.timezone = p_timezone) OR s.next_at <= t THEN s.next_at ELSE p_next END
    WHERE s.name = p_name;
  RETURN true;
END $$;

-- The row, locked, if it is due and no other process has it.
CREATE OR REPLACE FUNCTION schedule_take(p_name text, p_cron text, p_timezone text, p_type text)
RETURNS TABLE (next_ms double precision, now_ms double precision)
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT extract(epoch FROM s.next_at) * 1000, extract(epoch FROM clock()) * 1000 FROM schedules s
    WHERE s.name = p_name AND s.cron = p_cron AND s.timezone = p_timezone AND s.type = p_type AND s.next_at <= clock()
    FOR UPDATE SKIP LOCKED
$$;

-- Says that these are still defined, and removes those that no process has defined for p_keep_ms.
CREATE OR REPLACE FUNCTION schedules_seen(p_names text[], p_keep_ms bigint) RETURNS bigint
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  v_removed bigint;
BEGIN
  UPDATE schedules s SET seen_at = clock()
    WHERE s.name IN (SELECT x.name FROM schedules x WHERE x.name = ANY (p_names) FOR UPDATE SKIP LOCKED);
  DELETE FROM schedules s
    WHERE s.name IN (SELECT x.name FROM schedules x WHERE x.seen_at < clock() - p_keep_ms * interval '1 ms'
          FOR UPDATE SKIP LOCKED);
  GET DIAGNOSTICS v_removed = ROW_COUNT;
  RETURN v_removed;
END $$;
`,
    },
    {
      name: 'settle',
      sql: `-- Settles what a process has finished.
--
-- Per lane, sorted by id: everything up to s_head leaves the lane; s_retry_ms puts the next operation back with a
-- delay; s_release gives the lane back. The fence: a settlement whose lease row is gone, or whose lane is not in it,
-- is refused as a whole.
--
-- Plans: the joins go from the small arrays to an index each time. Hash joins and sequential scans over small tables
-- that churn are a third slower (measured), so they are off inside these functions. Nested loops from the sorted arrays
-- also keep the lock order. The steps of settle have no settings of their own and run with those of settle.

-- Takes what settling these lanes will take, in the same order, before the effects are written: those may lock what
-- comes behind it in the lock order (the ledger's head is last). Per lane: false when the lease is lost.
CREATE OR REPLACE FUNCTION settle_hold(
  p_worker uuid, p_fences bigint[], p_lanes uuid[], p_keys uuid[]
) RETURNS boolean[]
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  PERFORM pause_guard();
  PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
  IF NOT FOUND THEN RETURN array_fill(false, ARRAY[cardinality(p_lanes)]); END IF;
  PERFORM FROM leases l WHERE l.fence = ANY (p_fences) AND l.worker = p_worker ORDER BY l.fence FOR UPDATE;
  IF cardinality(p_keys) > 0 THEN
    PERFORM FROM idempotency d WHERE d.key = ANY (p_keys) ORDER BY d.key FOR UPDATE;
  END IF;
  PERFORM FROM lanes l WHERE l.id = ANY (p_lanes) ORDER BY l.id FOR UPDATE;
  RETURN (SELECT array_agg(EXISTS (SELECT FROM leases l
          WHERE l.fence = u.fence AND l.worker = p_worker AND u.lane = ANY (l.lanes)) ORDER BY u.i)
    FROM unnest(p_fences, p_lanes) WITH ORDINALITY u(fence, lane, i));
END $$;

-- Returns the fences that are lost; then nothing was written. The caller drops what is lost and comes again with the
-- rest.
CREATE OR REPLACE FUNCTION settle(
  p_worker uuid, p_part smallint,
  s_fence bigint[], s_lane uuid[], s_from bigint[], s_head bigint[], s_left bigint[], s_release boolean[],
  s_retry_ms bigint[], s_retry_error text[], s_ago_ms bigint[],
  p_types text[], p_type_counts bigint[],    -- how many leave, per type
  p_gates text[], p_gate_counts bigint[],
  r_lane uuid[], r_seq bigint[], r_status text[], r_result text[], r_error text[], r_ago_ms bigint[],
  r_counted boolean[],
  r_key uuid[], r_answer text[],             -- the answers of their idempotency keys; empty if none has one
  s_leave text[]                             -- label of those that the next operation is left to; NULL if none is
) RETURNS bigint[]
  LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_hashjoin = off SET enable_mergejoin = off
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_lost bigint[]; v_leave text[]; v_gone bigint; v_release boolean[] := s_release;
  v_paused boolean := pause_guard(); v_keyed boolean := false;
  l record;
BEGIN
  -- First of all: a process that gives this one up takes the same lock first.
  PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
  IF NOT FOUND THEN RETURN (SELECT array_agg(DISTINCT x) FROM unnest(s_fence) x); END IF;
  IF s_leave IS NOT NULL THEN v_leave := settle_labels(s_leave); END IF;
  v_lost := fences_check(p_worker, s_fence, s_lane);
  IF v_lost IS NOT NULL THEN RETURN v_lost; END IF;

  IF cardinality(r_key) > 0 THEN PERFORM idempotency_settle(r_lane, r_seq, r_key, r_answer); END IF;
  IF cardinality(p_gates) > 0 THEN PERFORM gates_release(p_gates, p_gate_counts); END IF;
  l := lanes_move(s_lane, s_head, s_left, t);
  IF l.has_alone THEN v_keyed := turns_lock(s_lane); END IF;
  IF 0 <= ANY (s_retry_ms) THEN PERFORM ops_retry(s_lane, s_head, s_retry_ms, s_retry_error, v_leave, t); END IF;
  IF l.has_more THEN
    PERFORM lanes_release(s_lane, s_release, s_retry_ms, l.queues, l.partitions, l.heads, l.depths, l.careful, v_leave,
      v_paused, t);
  END IF;
  -- An empty lane is released, whether that was asked for or not.
  IF l.has_emptied THEN
    SELECT array_agg(u.release OR u.depth = 0) INTO v_release FROM unnest(s_release, l.depths) u(release, depth);
  END IF;

  v_gone := CASE WHEN cardinality(r_lane) = 0
    THEN ops_complete(s_lane, s_from, s_head, s_ago_ms, l.queues, l.partitions, t)
    ELSE ops_finish(r_lane, r_seq, r_status, r_result, r_error, r_ago_ms, r_counted, t) END;
  IF v_gone IS DISTINCT FROM (SELECT coalesce(sum(x), 0) FROM unnest(s_left) x) THEN
    RAISE EXCEPTION 'settled % operations where % were expected', v_gone, (SELECT sum(x) FROM unnest(s_left) x)
      USING ERRCODE = 'XX000';
  END IF;
  IF v_keyed THEN PERFORM turns_return(s_lane); END IF;
  IF l.has_alone THEN PERFORM lanes_drop(s_lane); END IF;
  PERFORM leases_shrink(s_fence, s_lane, v_release);
  FOR i IN 1 .. cardinality(p_types) LOOP
    PERFORM tally(p_worker, p_part, p_types[i], - p_type_counts[i]);
  END LOOP;
  RETURN '{}';
END $$;

-- Which of these labels a process still announces. The process that removes the last of them waits for us, and then
-- finds the label that we set (worker_forget).
CREATE OR REPLACE FUNCTION settle_labels(p_labels text[]) RETURNS text[]
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM FROM workers w WHERE w.announced ?| p_labels ORDER BY w.id FOR KEY SHARE;
  RETURN ARRAY(SELECT CASE WHEN EXISTS (SELECT FROM workers w WHERE w.announced ? u.label) THEN u.label END
    FROM unnest(p_labels) WITH ORDINALITY u(label, i) ORDER BY u.i);
END $$;

-- The fence: every lease named must exist, be ours, and still hold the lane. Returns the fences that are lost, or NULL.
CREATE OR REPLACE FUNCTION fences_check(p_worker uuid, p_fences bigint[], p_lanes uuid[]) RETURNS bigint[]
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  RETURN (SELECT array_agg(u.fence) FROM (
      SELECT s.fence, array_agg(s.lane ORDER BY s.lane) AS lanes FROM unnest(p_fences, p_lanes) s(fence, lane)
      GROUP BY s.fence ORDER BY s.fence
    ) u LEFT JOIN LATERAL (
      SELECT l.lanes FROM leases l WHERE l.fence = u.fence AND l.worker = p_worker FOR UPDATE
    ) l ON true
    -- Mostly a claim is settled as a whole, and equality is found in one pass; containment compares each with each.
    WHERE l.lanes IS NULL OR NOT (u.lanes = l.lanes OR u.lanes <@ l.lanes));
END $$;

-- Moves the lanes on, in id order (p_lanes is sorted, and the results are in its order). A statement of its own: what
-- is read of them from here on stays so until we commit.
CREATE OR REPLACE FUNCTION lanes_move(
  p_lanes uuid[], p_heads bigint[], p_left bigint[], p_at timestamptz,
  OUT queues text[], OUT partitions text[], OUT heads bigint[], OUT depths bigint[], OUT careful boolean[],
  OUT has_more boolean, OUT has_emptied boolean, OUT has_alone boolean
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  WITH moved AS (
    UPDATE lanes l SET
      head = greatest(l.head, u.head), depth = l.depth - u.gone,
      running = false, moved_at = CASE WHEN u.gone > 0 THEN p_at ELSE l.moved_at END,
      pace_ms = CASE WHEN u.gone = 0 THEN l.pace_ms ELSE
        coalesce(l.pace_ms * 0.7, 0) + (CASE WHEN l.pace_ms IS NULL THEN 1 ELSE 0.3 END)
          * least(date_part('epoch', p_at - l.moved_at) * 1000 / u.gone, 3.6e6) END
    FROM unnest(p_lanes, p_heads, p_left) u(lane, head, gone)
    WHERE l.id = u.lane
    RETURNING l.queue, l.partition, l.head, l.depth, l.careful > l.head AS careful, l.alone
  )
  SELECT array_agg(m.queue), array_agg(m.partition), array_agg(m.head), array_agg(m.depth), array_agg(m.careful),
      bool_or(m.depth > 0), bool_or(m.depth = 0), bool_or(m.alone)
    INTO queues, partitions, heads, depths, careful, has_more, has_emptied, has_alone FROM moved m;
END $$;

-- An operation that failed and is retried keeps its place.
CREATE OR REPLACE FUNCTION ops_retry(
  p_lanes uuid[], p_heads bigint[], p_retry_ms bigint[], p_errors text[], p_labels text[], p_at timestamptz
) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE ops o SET attempts = o.attempts + CASE WHEN u.error IS NULL THEN 0 ELSE 1 END,
      error = coalesce(u.error, o.error), started_at = NULL,
      not_before = CASE WHEN u.label IS NULL THEN p_at + u.retry_ms * interval '1 ms' END
    FROM (
      SELECT x.lane, n.seq, x.retry_ms, x.error, x.label
      FROM unnest(p_lanes, p_heads, p_retry_ms, p_errors, p_labels) x(lane, head, retry_ms, error, label),
        LATERAL (SELECT y.seq FROM ops y WHERE y.lane = x.lane AND y.seq > x.head ORDER BY y.seq LIMIT 1) n
      WHERE x.retry_ms IS NOT NULL OFFSET 0
    ) u WHERE o.lane = u.lane AND o.seq = u.seq;
END $$;

-- Puts the lanes that are given back where they belong: the next operation decides. Its stamp is not before those who
-- wait: an identity whose lanes are all claimed lags behind what was claimed of others, and a newcomer, who begins
-- where that is, would have to wait until it has caught up.
CREATE OR REPLACE FUNCTION lanes_release(
  p_lanes uuid[], p_release boolean[], p_retry_ms bigint[], p_queues text[], p_partitions text[], p_heads bigint[],
  p_depths bigint[], p_careful boolean[], p_labels text[], p_paused boolean, p_at timestamptz
) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_levels bigint[] := ARRAY(
    SELECT (SELECT x.stamp FROM ready x WHERE x.priority = p ORDER BY x.stamp LIMIT 1) FROM generate_series(1, 10) p);
BEGIN
  WITH next AS (
    SELECT u.lane, CASE WHEN u.label IS NULL THEN u.retry_ms END AS retry_ms, u.queue, u.partition, u.head, u.depth,
      u.careful, o.seq, o.priority, o.stamp AS was, greatest(o.stamp, v_levels[o.priority] + 1) AS stamp,
      coalesce(u.label, o.type) AS type, o.not_before,
      p_paused AND EXISTS (SELECT FROM pauses p WHERE CASE WHEN p.queue = '' THEN p.partition = o.type
        ELSE p.queue = u.queue AND (p.partition IS NULL OR p.partition = u.partition) END) AS paused
    FROM unnest(p_lanes, p_release, p_retry_ms, p_queues, p_partitions, p_heads, p_depths, p_careful, p_labels)
        u(lane, release, retry_ms, queue, partition, head, depth, careful, label),
      LATERAL (
        SELECT x.seq, x.priority, x.stamp, x.type, x.not_before FROM ops x
        WHERE x.lane = u.lane AND x.seq > u.head ORDER BY x.seq LIMIT 1
      ) o
    WHERE u.release AND u.depth > 0
  ), lifted AS (
    UPDATE ops o SET stamp = n.stamp FROM next n WHERE n.stamp > n.was AND o.lane = n.lane AND o.seq = n.seq
  ), put_aside AS (
    INSERT INTO parked (lane, until, reason)
    SELECT n.lane, CASE WHEN n.paused THEN 'infinity'::timestamptz
        WHEN n.retry_ms IS NOT NULL THEN p_at + n.retry_ms * interval '1 ms' ELSE n.not_before END,
      CASE WHEN n.paused THEN 'pause' WHEN n.retry_ms IS NOT NULL THEN 'retry' ELSE 'delay' END
    FROM next n WHERE n.paused OR n.retry_ms IS NOT NULL OR n.not_before > p_at
  )
  INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
    SELECT n.lane, n.priority, n.stamp, n.type, n.head, n.depth, n.careful, n.queue, n.partition FROM next n
    WHERE NOT n.paused AND n.retry_ms IS NULL AND (n.not_before IS NULL OR n.not_before <= p_at);
END $$;

-- Moves completed operations without results to history, by ranges. Returns how many. From one source, or the range is
-- not used for the index: with lanes joined in, whole lanes were read.
CREATE OR REPLACE FUNCTION ops_complete(
  p_lanes uuid[], p_from bigint[], p_heads bigint[], p_ago_ms bigint[], p_queues text[], p_partitions text[],
  p_at timestamptz
) RETURNS bigint
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_gone bigint;
BEGIN
  WITH gone AS (
    DELETE FROM ops o
    USING unnest(p_lanes, p_from, p_heads, p_ago_ms, p_queues, p_partitions) u(lane, base, head, ago, queue, partition)
    WHERE o.lane = u.lane AND o.seq > u.base AND o.seq <= u.head
    RETURNING o.id, o.type, o.priority, o.identity, o.accepted_at, o.attempts, o.max_attempts, o.trace, u.queue,
      u.partition, u.ago
  )
  INSERT INTO history (id, finished_at, status, type, queue, partition, priority, identity, accepted_at, started_at,
      attempts, max_attempts, error, trace)
    SELECT g.id, p_at, 'completed', g.type, g.queue, g.partition, g.priority, g.identity, g.accepted_at,
      p_at - g.ago * interval '1 ms', g.attempts + 1, g.max_attempts, NULL, g.trace
    FROM gone g;
  GET DIAGNOSTICS v_gone = ROW_COUNT;
  RETURN v_gone;
END $$;

-- Moves finished operations to history, and failed ones to the dead letters, one by one. Returns how many.
-- 'answered' and 'expired' are failed, too, but leave no dead letter: the caller was answered with it, or running it
-- again would be too late again.
-- Each insert joins the lanes itself: one join for both would copy whole operations, payloads too, once more (4%).
CREATE OR REPLACE FUNCTION ops_finish(
  r_lane uuid[], r_seq bigint[], r_status text[], r_result text[], r_error text[], r_ago_ms bigint[],
  r_counted boolean[], p_at timestamptz
) RETURNS bigint
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_gone bigint;
BEGIN
  WITH gone AS (
    DELETE FROM ops o
    USING unnest(r_lane, r_seq, r_status, r_result, r_error, r_ago_ms, r_counted)
      u(lane, seq, status, result, error, ago, counted)
    WHERE o.lane = u.lane AND o.seq = u.seq
    RETURNING o.*, u.status, u.result, u.error AS why, u.ago, u.counted
  ), kept AS (
    INSERT INTO history (id, finished_at, status, type, queue, partition, priority, identity, accepted_at, started_at,
        attempts, max_attempts, error, result, trace, code)
    SELECT g.id, p_at, CASE WHEN g.status IN ('answered', 'expired') THEN 'failed' ELSE g.status END, g.type, l.queue,
      l.partition, g.priority, g.identity, g.accepted_at,
      CASE WHEN g.counted THEN p_at - g.ago * interval '1 ms' END, g.attempts + g.counted::int, g.max_attempts, g.why,
      g.result::json, g.trace, CASE g.status WHEN 'expired' THEN 'expired' END
    FROM gone g JOIN lanes l ON l.id = g.lane WHERE g.status <> 'failed'
    RETURNING 1
  ), died AS (
    INSERT INTO dead_letters (id, died_at, lane, seq, queue, partition, type, priority, identity, payload, accepted_at,
        started_at, attempts, max_attempts, timeout_ms, error, result, trace, gate, key, most)
    SELECT g.id, p_at, g.lane, g.seq, l.queue, l.partition, g.type, g.priority, g.identity, g.payload, g.accepted_at,
      CASE WHEN g.counted THEN p_at - g.ago * interval '1 ms' END, g.attempts + g.counted::int, g.max_attempts,
      g.timeout_ms, g.why, g.result::json, g.trace, g.gate, l.key,
      (SELECT k.most FROM turns k WHERE k.key = l.key)
    FROM gone g JOIN lanes l ON l.id = g.lane WHERE g.status = 'failed'
    RETURNING 1
  )
  SELECT (SELECT count(*) FROM kept) + (SELECT count(*) FROM died) INTO v_gone;
  RETURN v_gone;
END $$;

-- A lease whose lanes are all released is deleted, the others lose those that are. (All lanes named are in their
-- leases, each once, so comparing numbers is enough.)
CREATE OR REPLACE FUNCTION leases_shrink(p_fences bigint[], p_lanes uuid[], p_release boolean[]) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  DELETE FROM leases l USING (
      SELECT x.fence, count(*) AS n FROM unnest(p_fences, p_release) x(fence, release) WHERE x.release GROUP BY x.fence
    ) u WHERE l.fence = u.fence AND cardinality(l.lanes) = u.n;
  UPDATE leases l SET lanes = k.lanes, uptos = k.uptos
    FROM (SELECT DISTINCT x.fence FROM unnest(p_fences, p_release) x(fence, release) WHERE x.release) f,
      LATERAL (
        SELECT coalesce(array_agg(z.lane), '{}') AS lanes, coalesce(array_agg(z.upto), '{}') AS uptos
        FROM leases q, unnest(q.lanes, q.uptos) z(lane, upto)
        WHERE q.fence = f.fence AND NOT EXISTS (
          SELECT FROM unnest(p_lanes, p_release) g(lane, release) WHERE g.release AND g.lane = z.lane)
      ) k
    WHERE l.fence = f.fence;
END $$;

-- After a commit that was not confirmed. The transaction in question holds the lease's lock until it has ended.
CREATE OR REPLACE FUNCTION confirm(p_worker uuid, p_fence bigint, p_lane uuid, p_seq bigint) RETURNS text
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  PERFORM FROM leases l WHERE l.fence = p_fence AND l.worker = p_worker AND p_lane = ANY (l.lanes) FOR UPDATE;
  IF NOT FOUND THEN RETURN 'lost'; END IF;
  RETURN CASE WHEN EXISTS (SELECT FROM ops o WHERE o.lane = p_lane AND o.seq = p_seq) THEN 'pending' ELSE 'left' END;
END $$;
`,
    },
    {
      name: 'streams-sweep',
      sql: `-- Makes and drops the partitions of stream records, and forgets streams whose retention is over.
--
-- Three kinds of short transactions, because making a partition locks the default partition, dropping one locks all of
-- them, and an append that waits for one may hold what the other waits for.

-- NULL: another process sweeps.
CREATE OR REPLACE FUNCTION stream_sweep_lock() RETURNS boolean
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT set_config('lock_timeout', '500ms', true) IS NOT NULL
    AND pg_try_advisory_xact_lock(hashtext('spillway.streams'), hashtext(current_schema()))
$$;

CREATE OR REPLACE FUNCTION stream_sweep_entries(p_retention_ms bigint, p_longest_ms bigint, p_rows int) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  v_kept timestamptz := clock() - p_retention_ms * interval '1 ms';
  v_ended int; v_left int;
BEGIN
  IF NOT stream_sweep_lock() THEN RETURN NULL; END IF;
  DELETE FROM streams s
    WHERE s.ctid = ANY (ARRAY(SELECT x.ctid FROM streams x WHERE x.ended_at < v_kept LIMIT p_rows
          FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS v_ended = ROW_COUNT;
  DELETE FROM streams s WHERE s.ctid = ANY (ARRAY(SELECT x.ctid FROM streams x
    WHERE x.ended_at IS NULL AND x.born_at < v_kept - p_longest_ms * interval '1 ms' LIMIT p_rows
    FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS v_left = ROW_COUNT;
  RETURN v_ended + v_left;
END $$;

CREATE OR REPLACE FUNCTION stream_sweep_ahead(p_kept_ms bigint) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  t timestamptz := clock();
  v_width interval := greatest(60000, p_kept_ms / 6) * interval '1 ms';
  v_from timestamptz; v_name text; v_made int := 0;
BEGIN
  IF NOT stream_sweep_lock() THEN RETURN NULL; END IF;
  -- Where nothing covers the present yet, records go to the rest meanwhile: the first partition begins a little later.
  v_from := date_trunc('milliseconds', greatest(t + interval '10 seconds', (SELECT max(s.to_at) FROM stream_spans s)));
  WHILE v_from < t + 2 * v_width LOOP
    -- Records in the rest would overlap with a partition that starts before them.
    IF EXISTS (SELECT FROM stream_chunks_rest c WHERE c.born_at >= v_from) THEN
      v_from := date_trunc('milliseconds', t + interval '10 seconds');
    END IF;
    v_name := 'stream_chunks_' || to_char(v_from AT TIME ZONE 'UTC', 'YYYYMMDDHH24MISSMS');
    -- Its rows are never changed, and it is dropped long before they would have to be frozen: nothing to vacuum.
    EXECUTE format(
      'CREATE TABLE %I PARTITION OF stream_chunks FOR VALUES FROM (%L) TO (%L) '
        'WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off)',
      v_name, v_from, v_from + v_width);
    INSERT INTO stream_spans (name, from_at, to_at) VALUES (v_name, v_from, v_from + v_width);
    v_made := v_made + 1;
    v_from := v_from + v_width;
  END LOOP;
  RETURN v_made;
END $$;

-- Records whose streams are all forgotten. p_kept_ms: the longest that a stream may last, and its retention.
CREATE OR REPLACE FUNCTION stream_sweep_behind(p_kept_ms bigint, p_rows int) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  v_before timestamptz := clock() - p_kept_ms * interval '1 ms';
  r record; v_dropped int := 0;
BEGIN
  IF NOT stream_sweep_lock() THEN RETURN NULL; END IF;
  FOR r IN SELECT p.name FROM stream_spans p WHERE p.to_at < v_before
    AND NOT EXISTS (SELECT FROM streams s WHERE s.born_at >= p.from_at AND s.born_at < p.to_at AND s.log = 'postgres')
  LOOP
    EXECUTE format('DROP TABLE IF EXISTS %I', r.name);
    DELETE FROM stream_spans p WHERE p.name = r.name;
    v_dropped := v_dropped + 1;
  END LOOP;
  DELETE FROM stream_chunks_rest c WHERE c.ctid = ANY (ARRAY(SELECT x.ctid FROM stream_chunks_rest x
    WHERE x.born_at < v_before AND NOT EXISTS (SELECT FROM streams s WHERE s.id = x.stream) LIMIT p_rows));
  RETURN v_dropped;
END $$;
`,
    },
    {
      name: 'streams',
      sql: `-- Writes, reads and watches streams.
--
-- A record is written only directly after a record that is not an end. So a log has neither holes nor anything after
-- its end, whatever a writer believes.

CREATE OR REPLACE FUNCTION stream_born(p_ms bigint) RETURNS timestamptz
  LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT to_timestamp(p_ms::float8 / 1000) $$;

-- Writes records, given in the order of stream and number; which of them are there as this writer gave them. p_texts:
-- the records' chunks, with E'\\x1d' between the records. p_levels: how many records of its stream stand before it in
-- the call.
-- Those may be lost to another writer, whose record may end just where theirs would have: what stands behind them
-- goes behind this writer's own only. Looking for the record before each costs more than all the rest, so that the
-- adapter takes this way only where it does not know that record to be there.
CREATE OR REPLACE FUNCTION stream_append(
   p_streams uuid[], p_borns bigint[], p_firsts int[], p_lasts int[], p_writers text[], p_ends text[], p_texts text,
  p_levels int[]
) RETURNS boolean[]
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_texts text[] := string_to_array(p_texts, E'\\x1d');
  v_written boolean[];
BEGIN
  FOR v_level IN 0 .. (SELECT max(l) FROM unnest(p_levels) l) LOOP
    INSERT INTO stream_chunks (stream, born_at, first, last, writer, chunks, ended)
      SELECT g.stream, s.born_at, g.first, g.last, g.writer, g.chunks, g.ended
      FROM unnest(p_streams, p_borns, p_firsts, p_lasts, p_writers, p_ends, v_texts, p_levels) g(stream, born, first,
          last, writer, ended, chunks, level)
      JOIN streams s ON s.id = g.stream AND s.born_at = stream_born(g.born) AND s.ended IS NULL
      LEFT JOIN LATERAL (
        SELECT x.last, x.writer, x.ended FROM stream_chunks x
        WHERE x.stream = s.id AND x.born_at = s.born_at AND x.first < g.first ORDER BY x.first DESC LIMIT 1
      ) b ON true
      WHERE g.level = v_level AND g.first = coalesce(b.last, 0) + 1 AND b.ended IS NULL
        AND (v_level = 0 OR b.writer = g.writer)
      ON CONFLICT DO NOTHING;
  END LOOP;
  v_written := ARRAY(
    SELECT EXISTS (
      SELECT FROM stream_chunks x
      WHERE x.stream = g.stream AND x.first = g.first AND x.born_at = stream_born(g.born) AND x.last = g.last
        AND x.writer = g.writer
        AND x.ended IS NOT DISTINCT FROM g.ended
    )
    FROM unnest(p_streams, p_borns, p_firsts, p_lasts, p_writers, p_ends) WITH ORDINALITY g(stream, born, first,
        last, writer, ended, n) ORDER BY g.n);
  UPDATE streams s SET ended = g.ended, ended_at = clock()
    FROM unnest(p_streams, p_ends, v_written) g(stream, ended, written)
    WHERE g.written AND g.ended IS NOT NULL AND s.id = g.stream AND s.ended IS NULL;
  RETURN v_written;
END $$;

CREATE OR REPLACE FUNCTION stream_entries(
  p_ids uuid[]
)
RETURNS TABLE ( id uuid, identity text, format text, thread_id text, log text, direct boolean, born_ms bigint,
    age_ms float8, ended text, ended_ms_ago float8, last int )
  LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT s.id, s.identity, s.format, s.thread_id, s.log, s.direct, (extract(epoch FROM s.born_at) * 1000)::bigint,
    extract(epoch FROM c.t - s.born_at)::float8 * 1000, s.ended, extract(epoch FROM c.t - s.ended_at)::float8 * 1000,
      coalesce(h.last, 0)
  FROM clock() c(t), unnest(p_ids) u(id) JOIN streams s ON s.id = u.id
  LEFT JOIN LATERAL (
    SELECT x.last FROM stream_chunks x WHERE s.log = 'postgres' AND x.stream = s.id AND x.born_at = s.born_at
      ORDER BY x.first DESC LIMIT 1
  ) h ON true
$$;

-- Makes those known that are not, and answers what is known of all.
CREATE OR REPLACE FUNCTION stream_open(
   p_ids uuid[], p_identities text[], p_formats text[], p_threads text[], p_logs text[], p_directs boolean[],
  p_watchers uuid[], p_ms_ago bigint[]
)
RETURNS TABLE ( created boolean, id uuid, identity text, format text, thread_id text, log text, direct boolean,
    born_ms bigint, age_ms float8, ended text, ended_ms_ago float8, last int )
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  v_made uuid[];
BEGIN
  WITH made AS (
    INSERT INTO streams (id, identity, format, thread_id, log, direct, born_at, watcher)
      SELECT g.id, g.identity, g.format, g.thread_id, g.log, g.direct,
        date_trunc('milliseconds', clock() - g.ms_ago * interval '1 ms'), g.watcher
      FROM unnest(p_ids, p_identities, p_formats, p_threads, p_logs, p_directs, p_watchers, p_ms_ago) g(id, identity,
          format, thread_id, log, direct, watcher, ms_ago)
      ORDER BY g.id
      ON CONFLICT DO NOTHING
      RETURNING id
  )
  SELECT coalesce(array_agg(m.id), '{}') INTO v_made FROM made m;
  -- A snapshot of its own: it sees those whom somebody else has just made known.
  RETURN QUERY SELECT e.id = ANY (v_made), e.* FROM stream_entries(p_ids) e;
END $$;

-- A client reads it through that process now (p_reads), or has left it. Leaving is for who is still the one: false
-- where somebody else reads it.
CREATE OR REPLACE FUNCTION stream_watch(p_ids uuid[], p_watchers uuid[], p_reads boolean[]) RETURNS boolean[]
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  WITH held AS (
    SELECT s.id, g.watcher, g.reads FROM unnest(p_ids, p_watchers, p_reads) g(id, watcher, reads)
    JOIN streams s ON s.id = g.id AND (g.reads OR s.watcher = g.watcher) ORDER BY s.id FOR NO KEY UPDATE OF s
  ), changed AS (
    UPDATE streams s
      SET watcher = CASE WHEN h.reads THEN h.watcher END, unwatched_at = CASE WHEN NOT h.reads THEN clock() END
    FROM held h WHERE s.id = h.id AND (h.reads OR s.watcher = h.watcher) RETURNING s.id
  )
  SELECT ARRAY(
    SELECT EXISTS (SELECT FROM changed c WHERE c.id = g.id) FROM unnest(p_ids) WITH ORDINALITY g(id, n) ORDER BY g.n
  )
$$;

CREATE OR REPLACE FUNCTION stream_ended(p_ids uuid[], p_ends text[]) RETURNS void
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  WITH held AS (
    SELECT s.id, g.ended FROM unnest(p_ids, p_ends) g(id, ended) JOIN streams s ON s.id = g.id AND s.ended IS NULL
      ORDER BY s.id FOR NO KEY UPDATE OF s
  )
  UPDATE streams s SET ended = h.ended, ended_at = clock() FROM held h WHERE s.id = h.id AND s.ended IS NULL
$$;

-- Of these, those that nobody reads. One whose process is gone is unwatched from now on: when it went, nobody knows.
CREATE OR REPLACE FUNCTION stream_abandoned(p_ids uuid[]) RETURNS TABLE (id uuid, for_ms float8)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  WITH held AS (
    SELECT s.id FROM streams s
      WHERE s.id = ANY (p_ids) AND s.watcher IS NOT NULL AND NOT EXISTS (SELECT FROM workers w WHERE w.id = s.watcher)
    ORDER BY s.id FOR NO KEY UPDATE OF s
  )
  UPDATE streams s SET watcher = NULL, unwatched_at = clock() FROM held h
    WHERE s.id = h.id AND NOT EXISTS (SELECT FROM workers w WHERE w.id = s.watcher);
  RETURN QUERY SELECT s.id, greatest(0, extract(epoch FROM clock() - s.unwatched_at)::float8 * 1000) FROM streams s
    WHERE s.id = ANY (p_ids) AND s.unwatched_at IS NOT NULL;
END $$;

-- Streams without an end whose operation left the queue more than p_grace_ms ago: the process that ran or cancelled it
-- died before it wrote one, or could not. One process looks for all, every p_every_ms; the others find none.
CREATE OR REPLACE FUNCTION stream_orphans(p_every_ms bigint, p_grace_ms bigint, p_most int)
RETURNS TABLE ( id uuid, identity text, format text, thread_id text, log text, direct boolean,
    born_ms bigint, age_ms float8, ended text, ended_ms_ago float8, last int )
  LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_hashjoin = off SET enable_mergejoin = off
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
  v_since timestamptz := clock() - p_grace_ms * interval '1 ms';
BEGIN
  INSERT INTO stream_look AS x (next_at) VALUES (clock_timestamp() + p_every_ms * interval '1 ms')
    ON CONFLICT (one) DO UPDATE SET next_at = excluded.next_at WHERE x.next_at <= clock_timestamp();
  IF NOT FOUND THEN RETURN; END IF;
  -- The operation is written before its stream: where there is none, it has left.
  RETURN QUERY SELECT e.* FROM stream_entries(ARRAY(
    SELECT s.id FROM streams s
    WHERE s.ended_at IS NULL AND s.born_at < v_since AND NOT EXISTS (SELECT FROM ops o WHERE o.id = s.id)
      AND NOT EXISTS (SELECT FROM history h WHERE h.id = s.id AND h.finished_at > v_since)
      AND NOT EXISTS (SELECT FROM dead_letters d WHERE d.id = s.id AND d.died_at > v_since)
    ORDER BY s.born_at LIMIT p_most)) e;
END $$;
`,
    },
    {
      name: 'sweep',
      sql: `-- Removes expired rows and makes and drops partitions of history. Who calls it, and how often: maintenance/sweeps.ts.
--
-- A batch is a short transaction: it takes due rows in the order of an index on their time, skips locked rows, and
-- does not wait for the disk (a removal that a crash loses is done again). Rows that are still in use get a new time.
-- A batch begins where the one before it ended, because dead entries of the index stay until a vacuum; skipped rows
-- come with the next round, which begins at the start.

-- Takes the turn, for p_hold_ms if nothing is heard again. 0: it is ours; else how long to wait, in milliseconds.
CREATE OR REPLACE FUNCTION sweep_take(p_hold_ms bigint) RETURNS bigint
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  UPDATE sweep_turn x SET next_at = clock_timestamp() + p_hold_ms * interval '1 ms'
    WHERE x.next_at <= clock_timestamp();
  RETURN CASE WHEN FOUND THEN 0
    ELSE (SELECT greatest(1, ceil(extract(epoch FROM x.next_at - clock_timestamp()) * 1000)) FROM sweep_turn x) END;
END $$;

-- Gives the turn back: nobody sweeps for p_rest_ms.
CREATE OR REPLACE FUNCTION sweep_rest(p_rest_ms bigint) RETURNS void
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  UPDATE sweep_turn SET next_at = clock_timestamp() + p_rest_ms * interval '1 ms'
$$;

-- History comes and goes by whole partitions.
CREATE OR REPLACE FUNCTION sweep_history(
  p_retention_ms bigint, p_rows int
) RETURNS TABLE (partitions_made int, partitions_dropped int, history int)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_width interval := greatest(60000, p_retention_ms / 6) * interval '1 ms';
  v_from timestamptz; v_name text; r record;
BEGIN
  partitions_made := 0; partitions_dropped := 0; history := 0;
  -- One at a time; the others have nothing to add.
  IF NOT pg_try_advisory_xact_lock(hashtext('spillway.sweep'), hashtext(current_schema())) THEN
    RETURN NEXT;
    RETURN;
  END IF;
  PERFORM set_config('lock_timeout', '500ms', true);
  -- Where nothing covers the present yet, rows go to the rest meanwhile: the first partition begins a little later.
  v_from := greatest(t + interval '10 seconds', (SELECT max(s.to_at) FROM history_spans s));
  WHILE v_from < t + 2 * v_width LOOP
    -- Rows that fell into the rest would overlap with a partition that starts before them.
    IF EXISTS (SELECT FROM history_rest h WHERE h.finished_at >= v_from) THEN
      v_from := t + interval '10 seconds';
    END IF;
    v_name := 'history_' || to_char(v_from AT TIME ZONE 'UTC', 'YYYYMMDDHH24MISSMS');
    EXECUTE format('CREATE TABLE %I PARTITION OF history FOR VALUES FROM (%L) TO (%L)', v_name, v_from,
        v_from + v_width);
    INSERT INTO history_spans (name, from_at, to_at) VALUES (v_name, v_from, v_from + v_width);
    partitions_made := partitions_made + 1;
    v_from := v_from + v_width;
  END LOOP;
  FOR r IN SELECT s.name FROM history_spans s WHERE s.to_at < t - p_retention_ms * interval '1 ms' LOOP
    EXECUTE format('DROP TABLE IF EXISTS %I', r.name);
    DELETE FROM history_spans s WHERE s.name = r.name;
    partitions_dropped := partitions_dropped + 1;
  END LOOP;
  DELETE FROM history_rest h
    WHERE h.ctid = ANY (ARRAY(SELECT x.ctid FROM history_rest x
          WHERE x.finished_at < t - p_retention_ms * interval '1 ms' ORDER BY x.finished_at LIMIT p_rows));
  GET DIAGNOSTICS history = ROW_COUNT;
  RETURN NEXT;
END $$;

-- p_from: where to begin, of each table. A batch is full when one of them had more than it took.
CREATE OR REPLACE FUNCTION sweep_rows(
  p_rows int, p_from timestamptz[] DEFAULT '{-infinity,-infinity,-infinity}',
  OUT keys int, OUT rate_rows int, OUT lanes int, OUT cancels int, OUT is_full boolean, OUT upto timestamptz[]
)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_keys int; v_rates int; v_lanes int; v_key timestamptz; v_rate timestamptz; v_lane timestamptz;
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  WITH old AS MATERIALIZED (
    SELECT x.ctid AS at, x.expires_at FROM idempotency x WHERE x.expires_at >= p_from[1] AND x.expires_at < t
      ORDER BY x.expires_at LIMIT p_rows FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM idempotency d WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o)) RETURNING 1
  ) SELECT (SELECT count(*) FROM gone), count(*), coalesce(max(o.expires_at), p_from[1]) INTO keys, v_keys, v_key
  FROM old o;

  WITH old AS MATERIALIZED (
    SELECT x.ctid AS at, x.sweep_at, x.expires_at < t AS is_over FROM rates x
      WHERE x.sweep_at >= p_from[2] AND x.sweep_at < t ORDER BY x.sweep_at LIMIT p_rows FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM rates d WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o WHERE o.is_over)) RETURNING 1
  ), kept AS (
    UPDATE rates d SET sweep_at = d.expires_at WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o WHERE NOT o.is_over))
  ) SELECT (SELECT count(*) FROM gone), count(*), coalesce(max(o.sweep_at), p_from[2])
  INTO rate_rows, v_rates, v_rate FROM old o;

  -- Lanes that have been empty for an hour start again at 1 when they come back: nothing refers to their old numbers
  -- (dead letters would, so theirs stay).
  WITH old AS MATERIALIZED (
    SELECT x.ctid AS at, x.sweep_at, x.depth = 0 AND x.moved_at < t - interval '1 hour'
      AND NOT EXISTS (SELECT FROM dead_letters k WHERE k.lane = x.id) AS is_over
    FROM lanes x WHERE x.sweep_at >= p_from[3] AND x.sweep_at < t ORDER BY x.sweep_at LIMIT p_rows
    FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM lanes d WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o WHERE o.is_over)) RETURNING 1
  ), kept AS (
    UPDATE lanes d
      SET sweep_at = CASE WHEN d.depth = 0 AND d.moved_at > t - interval '1 hour' THEN d.moved_at
        ELSE t END + interval '1 hour'
      WHERE d.ctid = ANY (ARRAY(SELECT o.at FROM old o WHERE NOT o.is_over))
  ) SELECT (SELECT count(*) FROM gone), count(*), coalesce(max(o.sweep_at), p_from[3]) INTO lanes, v_lanes, v_lane
  FROM old o;

  DELETE FROM cancels d
    WHERE d.ctid = ANY (ARRAY(SELECT x.ctid FROM cancels x WHERE x.asked_at < t - interval '10 minutes'
          ORDER BY x.asked_at LIMIT p_rows FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS cancels = ROW_COUNT;
  upto := ARRAY[v_key, v_rate, v_lane];
  is_full := greatest(v_keys, v_rates, v_lanes, cancels) >= p_rows;
END $$;
`,
    },
    {
      name: 'tallies',
      sql: `-- Counts how many operations of a type are held. Each writing connection has rows of its own (part >= 0), so that two
-- connections never wait for each other. Long transactions share rows (part < 0): each takes one that is not locked.
--
-- These run with the settings of the functions that call them: setting the search_path again costs as much as counting.

CREATE OR REPLACE FUNCTION tally(p_worker uuid, p_part smallint, p_type text, p_n bigint) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  IF p_part >= 0 THEN
    INSERT INTO tallies AS x (worker, part, type, n) VALUES (p_worker, p_part, p_type, p_n)
      ON CONFLICT (worker, part, type) WHERE part >= 0 DO UPDATE SET n = x.n + excluded.n;
    RETURN;
  END IF;
  UPDATE tallies x SET n = x.n + p_n WHERE x.ctid = (
    SELECT y.ctid FROM tallies y WHERE y.part < 0 AND y.type = p_type LIMIT 1 FOR UPDATE SKIP LOCKED);
  IF NOT FOUND THEN
    INSERT INTO tallies (worker, part, type, n) VALUES ('00000000-0000-0000-0000-000000000000', -1, p_type, p_n);
  END IF;
END $$;

-- A step of accept. Counts what was written to the queue, p_n in all.
CREATE OR REPLACE FUNCTION tally_accepted(
  p_worker uuid, p_part smallint, p_types text[], p_verdicts text[], p_n bigint
) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  r record;
BEGIN
  IF p_n = 0 THEN RETURN; END IF;
  -- Mostly all are of one type: grouping them costs more than writing the row.
  IF p_part >= 0 AND p_types[1] = ALL (p_types) THEN
    INSERT INTO tallies AS x (worker, part, type, n) VALUES (p_worker, p_part, p_types[1], p_n)
      ON CONFLICT (worker, part, type) WHERE part >= 0 DO UPDATE SET n = x.n + excluded.n;
    RETURN;
  END IF;
  FOR r IN SELECT u.type, count(*) AS n FROM unnest(p_types, p_verdicts) u(type, verdict)
      WHERE u.verdict IN ('queue', 'execute') GROUP BY u.type ORDER BY u.type LOOP
    PERFORM tally(p_worker, p_part, r.type, r.n);
  END LOOP;
END $$;
`,
    },
    {
      name: 'turns',
      sql: `-- Turns of keys: who may start (tables/0009-turns.sql).

-- A step of accept. Takes permits for the new lanes of a flush, in order, and parks those that get none: they wait for
-- their turn, or for their delay. Per lane: whether it was parked, and if so how many wait before it; and whether it
-- may run at once (p_running: if it gets a permit).
CREATE OR REPLACE FUNCTION turns_take(
  p_lanes uuid[], p_queues text[], p_partitions text[], p_keys uuid[], p_most int[], p_lane int[], p_delay_ms bigint[],
  p_running int[], p_at timestamptz,
  OUT waits boolean[], OUT ahead bigint[], OUT running int[]
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_keys uuid[]; v_free bigint[]; v_before bigint[];
BEGIN
  -- The last of a flush says how many may run.
  INSERT INTO turns AS k (key, queue, partition, most, lanes)
    SELECT u.key, min(u.queue), min(u.partition), (array_agg(u.most ORDER BY u.i DESC))[1], count(*)
    FROM unnest(p_keys, p_queues, p_partitions, p_most) WITH ORDINALITY u(key, queue, partition, most, i)
    WHERE u.key IS NOT NULL GROUP BY u.key ORDER BY u.key
    ON CONFLICT (key) DO UPDATE SET most = excluded.most, lanes = k.lanes + excluded.lanes;
  -- A statement of its own: what is read now stays so until we commit.
  SELECT array_agg(k.key), array_agg(CASE
      WHEN EXISTS (SELECT FROM parked x WHERE x.key = k.key AND x.reason = 'turn') THEN 0
      ELSE greatest(0, k.most - k.running) END),
      array_agg(greatest(0, k.lanes - k.running - (SELECT count(*) FROM unnest(p_keys) y(key) WHERE y.key = k.key)))
    INTO v_keys, v_free, v_before FROM turns k WHERE k.key = ANY (p_keys);
  SELECT array_agg(x.key IS NOT NULL AND NOT x.starts ORDER BY x.i),
      array_agg(v_before[x.nr] + x.rn - 1 - least(x.wanted, v_free[x.nr]) ORDER BY x.i)
    INTO waits, ahead FROM (
      SELECT u.i, u.key, array_position(v_keys, u.key) AS nr,
        row_number() OVER (PARTITION BY u.key ORDER BY u.i) AS rn,
        count(*) FILTER (WHERE d.delay = 0) OVER (PARTITION BY u.key) AS wanted,
        d.delay = 0 AND count(*) FILTER (WHERE d.delay = 0) OVER (PARTITION BY u.key ORDER BY u.i)
          <= v_free[array_position(v_keys, u.key)] AS starts
      FROM unnest(p_keys) WITH ORDINALITY u(key, i)
      JOIN unnest(p_lane, p_delay_ms) d(lane, delay) ON d.lane = u.i AND u.key IS NOT NULL
      UNION ALL
      SELECT u.i, NULL, NULL, NULL, NULL, NULL FROM unnest(p_keys) WITH ORDINALITY u(key, i) WHERE u.key IS NULL
    ) x;
  INSERT INTO parked (lane, until, reason, key, turn)
    SELECT l.id, CASE WHEN d.delay > 0 THEN p_at + d.delay * interval '1 ms' ELSE 'infinity' END,
      CASE WHEN d.delay > 0 THEN 'delay' ELSE 'turn' END, l.key, l.turn
    FROM unnest(p_lane, p_delay_ms) d(lane, delay) JOIN lanes l ON l.id = p_lanes[d.lane] WHERE waits[d.lane];
  UPDATE turns k SET running = k.running + g.n FROM (
      SELECT u.key, count(*) AS n FROM unnest(p_keys, waits) u(key, waits) WHERE NOT u.waits AND u.key IS NOT NULL
      GROUP BY u.key) g
    WHERE k.key = g.key;
  running := ARRAY(SELECT CASE WHEN u.waits THEN 0 ELSE u.running END FROM unnest(p_running, waits) u(running, waits));
END $$;

-- Locks the keys of these lanes, whose locks the caller holds. False: none has a key.
CREATE OR REPLACE FUNCTION turns_lock(p_lanes uuid[]) RETURNS boolean
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM FROM turns k WHERE k.key IN (SELECT l.key FROM lanes l WHERE l.id = ANY (p_lanes)) ORDER BY k.key FOR UPDATE;
  RETURN FOUND;
END $$;

-- A step of settle. These lanes had permits; those that were parked or have emptied give them back. The keys are
-- locked.
CREATE OR REPLACE FUNCTION turns_return(p_lanes uuid[]) RETURNS void
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_keys uuid[];
BEGIN
  WITH aside AS (
    UPDATE parked x SET key = l.key, turn = l.turn FROM lanes l
      WHERE l.id = ANY (p_lanes) AND l.key IS NOT NULL AND x.lane = l.id RETURNING l.key
  ), given AS (
    SELECT u.key, count(*) AS n, count(*) FILTER (WHERE u.left) AS left FROM (
      SELECT a.key, false AS left FROM aside a
      UNION ALL SELECT l.key, true FROM lanes l
        WHERE l.id = ANY (p_lanes) AND l.key IS NOT NULL AND l.depth = 0
    ) u GROUP BY u.key
  ), done AS (
    UPDATE turns k SET running = k.running - g.n, lanes = k.lanes - g.left FROM given g WHERE k.key = g.key
      RETURNING k.key
  ) SELECT array_agg(d.key) INTO v_keys FROM done d;
  PERFORM turns_next(v_keys);
END $$;

-- Passes free permits of these keys, which the caller has locked, on to the first lanes that wait. A key without lanes
-- goes. Returns how many lanes became ready.
CREATE OR REPLACE FUNCTION turns_next(p_keys uuid[]) RETURNS int
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_n int;
BEGIN
  WITH first AS (
    SELECT w.lane FROM turns k, LATERAL (
      SELECT x.lane FROM parked x WHERE x.key = k.key AND x.reason = 'turn' ORDER BY x.turn
      LIMIT greatest(0, k.most - k.running)) w
    WHERE k.key = ANY (p_keys) AND k.running < k.most
  ), gone AS (
    DELETE FROM parked x USING first f WHERE x.lane = f.lane RETURNING x.lane, x.key
  ), readied AS (
    INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
      SELECT l.id, o.priority, o.stamp, o.type, l.head, l.depth, l.careful > l.head, l.queue, l.partition
      FROM gone g JOIN lanes l ON l.id = g.lane,
        LATERAL (SELECT y.priority, y.stamp, y.type FROM ops y WHERE y.lane = l.id AND y.seq > l.head
          ORDER BY y.seq LIMIT 1) o
      RETURNING 1
  ), counted AS (
    UPDATE turns k SET running = k.running + c.n
      FROM (SELECT g.key, count(*) AS n FROM gone g GROUP BY g.key) c WHERE k.key = c.key RETURNING 1
  )
  SELECT count(*) INTO v_n FROM readied;
  DELETE FROM turns k WHERE k.key = ANY (p_keys) AND k.lanes = 0;
  RETURN v_n;
END $$;

-- A step of promote. Lanes whose time has come wait for their turn. Claiming may hold other keys already, so it must
-- not wait for one: a key that is in use has its turn at the next claim.
CREATE OR REPLACE FUNCTION turns_promote(p_most int, p_at timestamptz) RETURNS int
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_keys uuid[];
BEGIN
  v_keys := ARRAY(SELECT k.key FROM turns k WHERE k.key IN (
      SELECT x.key FROM parked x WHERE x.until <= p_at AND x.key IS NOT NULL ORDER BY x.until LIMIT p_most)
    FOR UPDATE SKIP LOCKED);
  IF cardinality(v_keys) = 0 THEN RETURN 0; END IF;
  UPDATE parked x SET until = 'infinity', reason = 'turn' WHERE x.until <= p_at AND x.key = ANY (v_keys);
  RETURN turns_next(v_keys);
END $$;

-- What must hold between transactions; see audit.
CREATE OR REPLACE FUNCTION turns_audit() RETURNS TABLE (fault text)
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  WITH held AS (
    SELECT r.lane FROM ready r UNION ALL SELECT unnest(z.lanes) FROM leases z
  ), counted AS (
    SELECT l.key, count(*) AS lanes, count(h.lane) AS running FROM lanes l LEFT JOIN held h ON h.lane = l.id
    WHERE l.key IS NOT NULL GROUP BY l.key
  )
  SELECT format('key %s has %s lanes, %s of them running, but says %s and %s', coalesce(k.key, c.key), c.lanes,
      c.running, k.lanes, k.running)
    FROM turns k FULL JOIN counted c ON c.key = k.key
    WHERE (k.lanes, k.running::bigint) IS DISTINCT FROM (c.lanes, c.running)
  UNION ALL SELECT format('lane %s waits for its turn although key %s has a permit', x.lane, k.key)
    FROM turns k JOIN parked x ON x.key = k.key AND x.reason = 'turn' WHERE k.running < k.most
  UNION ALL SELECT format('lane %s is parked with another key or turn than its own', x.lane)
    FROM parked x JOIN lanes l ON l.id = x.lane WHERE (x.key, x.turn) IS DISTINCT FROM (l.key, l.turn)
$$;
`,
    },
    {
      name: 'verdicts',
      sql: `-- What becomes of each item of a flush, now that its lane is locked and has given out sequences.
--
-- A lane that holds nothing but what this flush brings starts with the item of rn 1. What runs is in nobody's way:
-- place 0 is the next to run. An item's stamp begins where its priority level is: at the smallest stamp that waits
-- there.
--
-- No ORDER BY: a function scan returns its rows in order, and sorting each array would cost more than making it.
CREATE OR REPLACE FUNCTION verdicts_decide(
  p_apply boolean, p_may_lease boolean, p_paused boolean, p_backlog_ms bigint,
  p_lane int[], p_rn bigint[], p_priority smallint[], p_stamp bigint[], p_lead bigint[], p_delay_ms bigint[],
  p_reason text[], p_pace_ms real[], p_decided text[],
  p_counts bigint[], p_tails bigint[], p_depths bigint[], p_running int[], p_paces real[], p_blocked bigint[],
  OUT verdicts text[], OUT seqs bigint[], OUT places bigint[], OUT waits_ms bigint[], OUT stamps bigint[],
  OUT reasons text[],
  OUT starts_lanes boolean,                  -- a lane that was empty begins with a queued item
  OUT accepted bigint                        -- how many are to be written as operations
)
  LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_level bigint[] := '{NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL}';
  v_priority int;
BEGIN
  -- Mostly all have one priority.
  FOREACH v_priority IN ARRAY CASE WHEN p_priority[1] = ALL (p_priority) THEN p_priority[1:1]
      ELSE ARRAY(SELECT DISTINCT u.priority FROM unnest(p_priority) u(priority)) END LOOP
    v_level[v_priority] := coalesce(
      (SELECT r.stamp FROM ready r WHERE r.priority = v_priority ORDER BY r.stamp LIMIT 1),
      (SELECT s.last_value FROM stamps s));
  END LOOP;
  SELECT array_agg(x.verdict), array_agg(x.seq),
      array_agg(greatest(0, x.before + x.rn - 1 - x.running)),
      array_agg((greatest(x.delay_ms, x.blocked_ms) + greatest(x.pace * (x.before + x.rn), p_backlog_ms))::bigint),
      array_agg(x.stamp),
      -- Order before load: the reason of an item behind another one is the order, unless it asked to be queued.
      array_agg(CASE WHEN x.reason IN ('requested', '+requested') THEN 'requested'
        WHEN x.reason = '+still_running' AND x.verdict = 'execute' THEN 'still_running'
        WHEN x.before > 0 OR x.rn > 1 THEN 'maintaining_order'
        WHEN x.reason NOT IN ('', '+still_running') THEN x.reason
        WHEN p_paused THEN 'maintaining_order' ELSE 'system_busy' END),
      bool_or(x.verdict = 'queue' AND x.rn = 1 AND x.before = 0),
      count(*) FILTER (WHERE x.verdict IN ('queue', 'execute'))
    INTO verdicts, seqs, places, waits_ms, stamps, reasons, starts_lanes, accepted
  FROM (
    SELECT u.rn, u.reason, u.delay_ms, p_blocked[u.lane] AS blocked_ms, p_running[u.lane] AS running,
      CASE WHEN p_apply AND p_depths[u.lane] = 0 THEN 0 ELSE p_depths[u.lane] - p_counts[u.lane] END AS before,
      p_tails[u.lane] - p_counts[u.lane] + u.rn AS seq,
      CASE WHEN p_paces[u.lane] < 0 THEN u.pace_ms ELSE p_paces[u.lane] END AS pace,
      greatest(u.stamp, v_level[u.priority] + u.lead) AS stamp,
      coalesce(u.decided, CASE WHEN p_apply AND p_depths[u.lane] = 0 THEN 'apply'
        WHEN u.rn = 1 AND p_may_lease AND p_running[u.lane] = 1 AND p_depths[u.lane] = p_counts[u.lane] THEN 'execute'
        ELSE 'queue' END) AS verdict
    FROM unnest(p_lane, p_rn, p_priority, p_stamp, p_lead, p_delay_ms, p_reason, p_pace_ms, p_decided)
      u(lane, rn, priority, stamp, lead, delay_ms, reason, pace_ms, decided)
  ) x;
END $$;

-- Nothing is before a parallel operation in its lane. Its place is among all that wait for the same slots (p_ahead);
-- or, if it waits for its turn (p_parked), behind those of its key (p_behind), of which p_most run at a time.
CREATE OR REPLACE FUNCTION places_alone(
  p_lane int[], p_alone boolean[], p_ahead bigint, p_parked boolean[], p_behind bigint[], p_most int[],
  p_pace_ms real[], p_delay_ms bigint[], p_places bigint[], p_waits_ms bigint[], p_reasons text[],
  OUT places bigint[], OUT waits_ms bigint[], OUT reasons text[]
)
  LANGUAGE sql IMMUTABLE AS $$
  SELECT array_agg(CASE WHEN x.waits THEN x.behind WHEN p_alone[x.lane] AND p_ahead > 0 THEN p_ahead + x.lane - 1
      ELSE x.place END),
    array_agg(CASE WHEN x.waits THEN greatest(x.wait_ms, (x.pace * (x.behind + 1) / p_most[x.lane])::bigint)
      ELSE x.wait_ms END),
    array_agg(CASE WHEN x.waits AND x.delay = 0 AND x.reason = 'system_busy' THEN 'maintaining_order'
      ELSE x.reason END)
  FROM (
    SELECT u.*, coalesce(p_parked[u.lane], false) AS waits, greatest(0, p_behind[u.lane]) AS behind
    FROM unnest(p_lane, p_places, p_waits_ms, p_reasons, p_pace_ms, p_delay_ms)
      u(lane, place, wait_ms, reason, pace, delay)
  ) x
$$;
`,
    },
  ],
}
