-- Made from the .sql files by `node scripts/schema-dump.mjs --write`; not meant to be run or edited.

CREATE SEQUENCE alerts_seq_seq AS bigint START 1 INCREMENT 1 MINVALUE 1 MAXVALUE 9223372036854775807 CACHE 1 OWNED BY alerts.seq;

CREATE SEQUENCE fences AS bigint START 1 INCREMENT 1 MINVALUE 1 MAXVALUE 9223372036854775807 CACHE 1;

CREATE SEQUENCE mq_groups_id_seq AS integer START 1 INCREMENT 1 MINVALUE 1 MAXVALUE 2147483647 CACHE 1 OWNED BY mq_groups.id;

CREATE SEQUENCE mq_queues_id_seq AS integer START 1 INCREMENT 1 MINVALUE 1 MAXVALUE 2147483647 CACHE 1 OWNED BY mq_queues.id;

CREATE SEQUENCE mq_traces_id_seq AS bigint START 1 INCREMENT 1 MINVALUE 1 MAXVALUE 9223372036854775807 CACHE 1 OWNED BY mq_traces.id;

CREATE SEQUENCE stamps AS bigint START 0 INCREMENT 1 MINVALUE 0 MAXVALUE 9223372036854775807 CACHE 1;

CREATE TABLE alert_reporters (
  key uuid NOT NULL,
  reporter uuid NOT NULL,
  until timestamp with time zone NOT NULL,
  CONSTRAINT alert_reporters_key_fkey FOREIGN KEY (key) REFERENCES alert_states(key) ON DELETE CASCADE,
  CONSTRAINT alert_reporters_pkey PRIMARY KEY (key, reporter)
);

CREATE TABLE alert_states (
  key uuid NOT NULL,
  name text NOT NULL,
  labels json NOT NULL,
  status text NOT NULL,
  severity text NOT NULL,
  message text NOT NULL,
  annotations json NOT NULL,
  alert uuid NOT NULL,
  seq bigint NOT NULL,
  at timestamp with time zone NOT NULL,
  CONSTRAINT alert_states_pkey PRIMARY KEY (key),
  CONSTRAINT alert_states_severity_check CHECK ((severity = ANY (ARRAY['warning'::text, 'critical'::text]))),
  CONSTRAINT alert_states_status_check CHECK ((status = ANY (ARRAY['firing'::text, 'resolved'::text])))
);

CREATE TABLE alerts (
  seq bigint GENERATED ALWAYS AS IDENTITY NOT NULL,
  id uuid NOT NULL,
  key uuid NOT NULL,
  name text NOT NULL,
  labels json NOT NULL,
  status text NOT NULL,
  severity text NOT NULL,
  message text NOT NULL,
  annotations json NOT NULL,
  at timestamp with time zone NOT NULL,
  delivery text NOT NULL,
  attempts integer DEFAULT 0 NOT NULL,
  operation uuid,
  CONSTRAINT alerts_delivery_check CHECK ((delivery = ANY (ARRAY['none'::text, 'waiting'::text, 'delivered'::text, 'failed'::text, 'dropped'::text]))),
  CONSTRAINT alerts_id_key UNIQUE (id),
  CONSTRAINT alerts_pkey PRIMARY KEY (seq),
  CONSTRAINT alerts_severity_check CHECK ((severity = ANY (ARRAY['warning'::text, 'critical'::text]))),
  CONSTRAINT alerts_status_check CHECK ((status = ANY (ARRAY['firing'::text, 'resolved'::text])))
);
CREATE INDEX alerts_waiting ON spillway.alerts USING btree (seq) WHERE (delivery = 'waiting'::text);

CREATE TABLE cancels (
  id uuid NOT NULL,
  asked_at timestamp with time zone NOT NULL,
  CONSTRAINT cancels_pkey PRIMARY KEY (id)
);
CREATE INDEX cancels_asked ON spillway.cancels USING btree (asked_at);

CREATE TABLE connection_pools (
  pool text NOT NULL,
  CONSTRAINT connection_pools_pkey PRIMARY KEY (pool)
);

CREATE TABLE connection_writers (
  pool text NOT NULL,
  worker uuid NOT NULL,
  seq bigint NOT NULL,
  CONSTRAINT connection_writers_pkey PRIMARY KEY (pool, worker)
) WITH (fillfactor=50);

CREATE TABLE connections (
  pool text NOT NULL,
  identity text NOT NULL,
  worker uuid NOT NULL,
  held integer NOT NULL,
  CONSTRAINT connections_held_check CHECK ((held > 0)),
  CONSTRAINT connections_pkey PRIMARY KEY (pool, identity, worker)
) WITH (fillfactor=50);

CREATE TABLE dead_letters (
  id uuid NOT NULL,
  died_at timestamp with time zone NOT NULL,
  lane uuid NOT NULL,
  seq bigint NOT NULL,
  queue text NOT NULL,
  partition text NOT NULL,
  type text NOT NULL,
  priority smallint NOT NULL,
  identity text NOT NULL,
  payload json NOT NULL,
  accepted_at timestamp with time zone NOT NULL,
  started_at timestamp with time zone,
  attempts integer NOT NULL,
  max_attempts integer NOT NULL,
  timeout_ms integer NOT NULL,
  error text,
  result json,
  trace text NOT NULL,
  gate text,
  CONSTRAINT dead_letters_pkey PRIMARY KEY (id)
);
CREATE INDEX dead_letters_lane ON spillway.dead_letters USING btree (lane);
CREATE INDEX dead_letters_queue ON spillway.dead_letters USING btree (queue, id);

CREATE TABLE gates (
  name text NOT NULL,
  held bigint DEFAULT 0 NOT NULL,
  full_at bigint NOT NULL,
  resume_below bigint NOT NULL,
  overflowing boolean DEFAULT false NOT NULL,
  changed_at timestamp with time zone NOT NULL,
  CONSTRAINT gates_check CHECK (((resume_below >= 1) AND (resume_below <= full_at))),
  CONSTRAINT gates_full_at_check CHECK ((full_at >= 1)),
  CONSTRAINT gates_held_check CHECK ((held >= 0)),
  CONSTRAINT gates_pkey PRIMARY KEY (name),
  CONSTRAINT petition_overflow TRIGGER DEFERRABLE INITIALLY DEFERRED
) WITH (fillfactor=50);
CREATE CONSTRAINT TRIGGER petition_overflow AFTER UPDATE OF overflowing ON spillway.gates DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (((new.name = 'petitions'::text) AND (old.overflowing IS DISTINCT FROM new.overflowing))) EXECUTE FUNCTION petition_overflow();

CREATE TABLE halts (
  scope text NOT NULL,
  reason text NOT NULL,
  since timestamp with time zone NOT NULL,
  CONSTRAINT halts_pkey PRIMARY KEY (scope)
);

CREATE TABLE history (
  id uuid NOT NULL,
  finished_at timestamp with time zone NOT NULL,
  status text NOT NULL,
  type text NOT NULL,
  queue text NOT NULL,
  partition text NOT NULL,
  priority smallint NOT NULL,
  identity text NOT NULL,
  accepted_at timestamp with time zone NOT NULL,
  started_at timestamp with time zone,
  attempts integer NOT NULL,
  max_attempts integer NOT NULL,
  error text,
  result json,
  trace text NOT NULL,
  CONSTRAINT history_status_check CHECK ((status = ANY (ARRAY['completed'::text, 'cancelled'::text])))
) PARTITION BY RANGE (finished_at);
CREATE INDEX history_id ON ONLY spillway.history USING btree (id);

CREATE TABLE history_rest PARTITION OF history DEFAULT;
CREATE INDEX history_rest_finished ON spillway.history_rest USING btree (finished_at);

CREATE TABLE history_spans (
  name text NOT NULL,
  from_at timestamp with time zone NOT NULL,
  to_at timestamp with time zone NOT NULL,
  CONSTRAINT history_spans_pkey PRIMARY KEY (name)
);

CREATE TABLE idempotency (
  key uuid NOT NULL,
  request uuid NOT NULL,
  op uuid NOT NULL,
  answer json,
  expires_at timestamp with time zone NOT NULL,
  CONSTRAINT idempotency_pkey PRIMARY KEY (key)
) WITH (autovacuum_vacuum_cost_delay=0, autovacuum_vacuum_scale_factor=0.02, fillfactor=80);
CREATE INDEX idempotency_expires ON spillway.idempotency USING btree (expires_at);

CREATE TABLE lanes (
  id uuid NOT NULL,
  queue text NOT NULL,
  partition text NOT NULL,
  head bigint DEFAULT 0 NOT NULL,
  tail bigint DEFAULT 0 NOT NULL,
  depth bigint DEFAULT 0 NOT NULL,
  careful bigint DEFAULT 0 NOT NULL,
  running boolean DEFAULT false NOT NULL,
  pace_ms real,
  moved_at timestamp with time zone NOT NULL,
  sweep_at timestamp with time zone NOT NULL,
  CONSTRAINT lanes_check CHECK (((head >= 0) AND (head <= tail))),
  CONSTRAINT lanes_check1 CHECK (((depth >= 0) AND (depth <= (tail - head)))),
  CONSTRAINT lanes_pkey PRIMARY KEY (id)
) WITH (autovacuum_vacuum_cost_delay=0, autovacuum_vacuum_scale_factor=0.05, fillfactor=50);
CREATE INDEX lanes_sweep ON spillway.lanes USING btree (sweep_at);

CREATE TABLE leases (
  fence bigint NOT NULL,
  worker uuid NOT NULL,
  lanes uuid[] NOT NULL,
  uptos bigint[] NOT NULL,
  claimed_at timestamp with time zone NOT NULL,
  CONSTRAINT leases_pkey PRIMARY KEY (fence)
) WITH (autovacuum_vacuum_cost_delay=0, autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=2000);

CREATE TABLE ledger (
  seq bigint NOT NULL,
  at timestamp with time zone NOT NULL,
  type text NOT NULL,
  actor text NOT NULL,
  trace_id text NOT NULL,
  payload text NOT NULL,
  prev_hash text NOT NULL,
  hash text NOT NULL,
  CONSTRAINT ledger_at_check CHECK ((isfinite(at) AND (at = date_trunc('milliseconds'::text, at)))),
  CONSTRAINT ledger_hash_check CHECK ((octet_length(hash) = 64)),
  CONSTRAINT ledger_pkey PRIMARY KEY (seq),
  CONSTRAINT ledger_prev_hash_check CHECK ((octet_length(prev_hash) = 64)),
  CONSTRAINT ledger_seq_check CHECK ((seq >= 1))
);
CREATE INDEX ledger_overflows ON spillway.ledger USING btree (seq) WHERE (type = ANY (ARRAY['petition.queue.overflow.started'::text, 'petition.queue.overflow.ended'::text]));
CREATE TRIGGER ledger_append_only BEFORE DELETE OR UPDATE OR TRUNCATE ON spillway.ledger FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse();

CREATE TABLE ledger_head (
  one boolean DEFAULT true NOT NULL,
  seq bigint NOT NULL,
  hash text NOT NULL,
  CONSTRAINT ledger_head_one_check CHECK (one),
  CONSTRAINT ledger_head_pkey PRIMARY KEY (one)
) WITH (autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=1000, fillfactor=50);

CREATE TABLE migrations (
  owner text NOT NULL,
  id text NOT NULL,
  checksum text NOT NULL,
  release text NOT NULL,
  applied_at timestamp with time zone DEFAULT now() NOT NULL,
  CONSTRAINT migrations_pkey PRIMARY KEY (owner, id)
);

CREATE TABLE mq_cursors (
  partition uuid NOT NULL,
  grp integer NOT NULL,
  head bigint NOT NULL,
  done bigint[] DEFAULT '{}'::bigint[] NOT NULL,
  lease uuid,
  batch bigint[] DEFAULT '{}'::bigint[] NOT NULL,
  open bigint[] DEFAULT '{}'::bigint[] NOT NULL,
  tries jsonb DEFAULT '{}'::jsonb NOT NULL,
  careful bigint DEFAULT 0 NOT NULL,
  not_before timestamp with time zone,
  consumed bigint DEFAULT 0 NOT NULL,
  moved_at timestamp with time zone,
  CONSTRAINT mq_cursors_check CHECK (((cardinality(open) = 0) OR (lease IS NOT NULL))),
  CONSTRAINT mq_cursors_pkey PRIMARY KEY (partition, grp)
) WITH (autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=5000, fillfactor=50);
CREATE INDEX mq_cursors_grp ON spillway.mq_cursors USING btree (grp);

CREATE TABLE mq_dead (
  id uuid DEFAULT gen_random_uuid() NOT NULL,
  message_id uuid NOT NULL,
  partition uuid NOT NULL,
  seq bigint NOT NULL,
  queue text NOT NULL,
  partition_name text NOT NULL,
  namespace text,
  task text,
  grp text NOT NULL,
  transaction_id text NOT NULL,
  trace_id text,
  sealed boolean NOT NULL,
  payload text NOT NULL,
  error text,
  retry_count integer NOT NULL,
  is_letter boolean NOT NULL,
  created_at timestamp with time zone NOT NULL,
  moved_at timestamp with time zone NOT NULL,
  CONSTRAINT mq_dead_pkey PRIMARY KEY (id)
);
CREATE INDEX mq_dead_message ON spillway.mq_dead USING btree (partition, transaction_id);
CREATE INDEX mq_dead_queue ON spillway.mq_dead USING btree (queue, moved_at DESC);

CREATE TABLE mq_groups (
  id integer GENERATED ALWAYS AS IDENTITY NOT NULL,
  queue integer NOT NULL,
  name text NOT NULL,
  mode text NOT NULL,
  since timestamp with time zone NOT NULL,
  reached uuid,
  starts timestamp with time zone,
  created_at timestamp with time zone NOT NULL,
  CONSTRAINT mq_groups_pkey PRIMARY KEY (id),
  CONSTRAINT mq_groups_queue_fkey FOREIGN KEY (queue) REFERENCES mq_queues(id) ON DELETE CASCADE,
  CONSTRAINT mq_groups_queue_name_key UNIQUE (queue, name)
);

CREATE TABLE mq_leases (
  id uuid NOT NULL,
  grp integer NOT NULL,
  until timestamp with time zone NOT NULL,
  partitions uuid[] NOT NULL,
  CONSTRAINT mq_leases_pkey PRIMARY KEY (id)
) WITH (autovacuum_vacuum_cost_delay=0, autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=2000, fillfactor=50);
CREATE INDEX mq_leases_due ON spillway.mq_leases USING btree (grp, until);

CREATE TABLE mq_messages (
  partition uuid NOT NULL,
  seq bigint NOT NULL,
  id uuid NOT NULL,
  transaction_id text NOT NULL,
  trace_id text,
  grp integer,
  sealed boolean NOT NULL,
  payload text NOT NULL,
  created_at timestamp with time zone NOT NULL,
  CONSTRAINT mq_messages_pkey PRIMARY KEY (partition, seq)
) WITH (autovacuum_vacuum_cost_delay=0, autovacuum_vacuum_insert_scale_factor=0.2, autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=20000);
CREATE UNIQUE INDEX mq_messages_once ON spillway.mq_messages USING btree (partition, transaction_id) WHERE (grp IS NULL);
CREATE INDEX mq_messages_replayed ON spillway.mq_messages USING btree (partition, transaction_id) WHERE (grp IS NOT NULL);

CREATE TABLE mq_partitions (
  id uuid NOT NULL,
  queue integer NOT NULL,
  name text NOT NULL,
  tail bigint NOT NULL,
  low bigint DEFAULT 0 NOT NULL,
  holes bigint[] DEFAULT '{}'::bigint[] NOT NULL,
  mark bigint DEFAULT 0 NOT NULL,
  marked_at timestamp with time zone,
  pushed_at timestamp with time zone NOT NULL,
  created_at timestamp with time zone NOT NULL,
  CONSTRAINT mq_partitions_check CHECK ((low <= tail)),
  CONSTRAINT mq_partitions_pkey PRIMARY KEY (id),
  CONSTRAINT mq_partitions_queue_fkey FOREIGN KEY (queue) REFERENCES mq_queues(id) ON DELETE CASCADE
) WITH (autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=5000, fillfactor=50);
CREATE INDEX mq_partitions_in_turn ON spillway.mq_partitions USING btree (queue, id);
CREATE INDEX mq_partitions_queue ON spillway.mq_partitions USING btree (queue, name);

CREATE TABLE mq_queues (
  id integer GENERATED ALWAYS AS IDENTITY NOT NULL,
  name text NOT NULL,
  namespace text,
  task text,
  lease_seconds integer DEFAULT 300 NOT NULL,
  retry_limit integer DEFAULT 3 NOT NULL,
  retry_delay_ms integer DEFAULT 1000 NOT NULL,
  max_size bigint DEFAULT 0 NOT NULL,
  priority integer DEFAULT 0 NOT NULL,
  delay_seconds integer DEFAULT 0 NOT NULL,
  window_seconds integer DEFAULT 0 NOT NULL,
  retention_seconds integer DEFAULT 0 NOT NULL,
  completed_retention_seconds integer DEFAULT 0 NOT NULL,
  retention_enabled boolean DEFAULT false NOT NULL,
  max_wait_seconds integer DEFAULT 0 NOT NULL,
  dead_letter_queue boolean DEFAULT false NOT NULL,
  dlq_after_max_retries boolean DEFAULT false NOT NULL,
  encryption_enabled boolean DEFAULT false NOT NULL,
  size_most bigint,
  created_at timestamp with time zone NOT NULL,
  CONSTRAINT mq_queues_completed_retention_seconds_check CHECK ((completed_retention_seconds >= 0)),
  CONSTRAINT mq_queues_delay_seconds_check CHECK ((delay_seconds >= 0)),
  CONSTRAINT mq_queues_lease_seconds_check CHECK ((lease_seconds > 0)),
  CONSTRAINT mq_queues_max_size_check CHECK ((max_size >= 0)),
  CONSTRAINT mq_queues_max_wait_seconds_check CHECK ((max_wait_seconds >= 0)),
  CONSTRAINT mq_queues_name_key UNIQUE (name),
  CONSTRAINT mq_queues_pkey PRIMARY KEY (id),
  CONSTRAINT mq_queues_retention_seconds_check CHECK ((retention_seconds >= 0)),
  CONSTRAINT mq_queues_retry_delay_ms_check CHECK ((retry_delay_ms >= 0)),
  CONSTRAINT mq_queues_retry_limit_check CHECK ((retry_limit >= 0)),
  CONSTRAINT mq_queues_window_seconds_check CHECK ((window_seconds >= 0))
);
CREATE INDEX mq_queues_namespace ON spillway.mq_queues USING btree (namespace, task);

CREATE TABLE mq_ready (
  partition uuid NOT NULL,
  grp integer NOT NULL,
  at timestamp with time zone NOT NULL,
  head bigint,
  CONSTRAINT mq_ready_pkey PRIMARY KEY (partition, grp)
) WITH (autovacuum_vacuum_cost_delay=0, autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=2000);
CREATE INDEX mq_ready_order ON spillway.mq_ready USING btree (grp, at);

CREATE TABLE mq_traces (
  id bigint GENERATED ALWAYS AS IDENTITY NOT NULL,
  partition uuid NOT NULL,
  transaction_id text NOT NULL,
  grp text,
  event text NOT NULL,
  names text[] NOT NULL,
  data text NOT NULL,
  worker text,
  created_at timestamp with time zone NOT NULL,
  CONSTRAINT mq_traces_pkey PRIMARY KEY (id)
);
CREATE INDEX mq_traces_message ON spillway.mq_traces USING btree (partition, transaction_id);

CREATE TABLE objective_counts (
  objective text NOT NULL,
  span text NOT NULL,
  bucket timestamp with time zone NOT NULL,
  good double precision NOT NULL,
  total double precision NOT NULL,
  CONSTRAINT objective_counts_check CHECK ((good <= total)),
  CONSTRAINT objective_counts_good_check CHECK ((good >= (0)::double precision)),
  CONSTRAINT objective_counts_pkey PRIMARY KEY (objective, span, bucket),
  CONSTRAINT objective_counts_span_check CHECK ((span = ANY (ARRAY['minute'::text, 'hour'::text])))
) WITH (fillfactor=50);

CREATE TABLE objective_writers (
  writer uuid NOT NULL,
  sent bigint NOT NULL,
  at timestamp with time zone NOT NULL,
  CONSTRAINT objective_writers_pkey PRIMARY KEY (writer)
) WITH (fillfactor=50);

CREATE TABLE ops (
  lane uuid NOT NULL,
  seq bigint NOT NULL,
  id uuid NOT NULL,
  type text NOT NULL,
  priority smallint NOT NULL,
  stamp bigint NOT NULL,
  identity text NOT NULL,
  payload json NOT NULL,
  accepted_at timestamp with time zone NOT NULL,
  not_before timestamp with time zone,
  started_at timestamp with time zone,
  attempts integer DEFAULT 0 NOT NULL,
  max_attempts integer NOT NULL,
  timeout_ms integer NOT NULL,
  error text,
  trace text DEFAULT ''::text NOT NULL,
  idem uuid,
  gate text,
  CONSTRAINT ops_max_attempts_check CHECK ((max_attempts >= 1)),
  CONSTRAINT ops_pkey PRIMARY KEY (lane, seq),
  CONSTRAINT ops_priority_check CHECK (((priority >= 1) AND (priority <= 10))),
  CONSTRAINT ops_timeout_ms_check CHECK ((timeout_ms >= 1))
) WITH (autovacuum_analyze_scale_factor=0, autovacuum_analyze_threshold=50000, autovacuum_vacuum_cost_delay=0, autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=5000);
CREATE UNIQUE INDEX ops_id ON spillway.ops USING btree (id);

CREATE TABLE parked (
  lane uuid NOT NULL,
  until timestamp with time zone NOT NULL,
  reason text NOT NULL,
  CONSTRAINT parked_pkey PRIMARY KEY (lane),
  CONSTRAINT parked_reason_check CHECK ((reason = ANY (ARRAY['delay'::text, 'retry'::text, 'pause'::text])))
) WITH (autovacuum_vacuum_cost_delay=0, autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=2000);
CREATE INDEX parked_until ON spillway.parked USING btree (until);

CREATE TABLE pauses (
  queue text NOT NULL,
  partition text,
  since timestamp with time zone NOT NULL,
  CONSTRAINT pauses_queue_partition_key UNIQUE NULLS NOT DISTINCT (queue, partition)
);

CREATE TABLE petition_blocks (
  submitter text NOT NULL,
  minute bigint NOT NULL,
  pending bigint NOT NULL,
  CONSTRAINT petition_blocks_pending_check CHECK ((pending >= 0)),
  CONSTRAINT petition_blocks_pkey PRIMARY KEY (submitter)
) WITH (fillfactor=50);
CREATE INDEX petition_blocks_pending ON spillway.petition_blocks USING btree (minute) WHERE (pending > 0);
CREATE INDEX petition_blocks_told ON spillway.petition_blocks USING btree (minute) WHERE (pending = 0);

CREATE TABLE petition_states (
  state text NOT NULL,
  n bigint DEFAULT 0 NOT NULL,
  CONSTRAINT petition_states_n_check CHECK ((n >= 0)),
  CONSTRAINT petition_states_pkey PRIMARY KEY (state)
) WITH (autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=1000, fillfactor=50);

CREATE TABLE petitions (
  id uuid NOT NULL,
  type text NOT NULL,
  state text NOT NULL,
  came_from text,
  text text NOT NULL,
  content_hash text NOT NULL,
  realm text,
  submitter text NOT NULL,
  fate_reason text,
  version integer DEFAULT 1 NOT NULL,
  created_at timestamp with time zone NOT NULL,
  updated_at timestamp with time zone NOT NULL,
  CONSTRAINT petitions_content_hash_check CHECK ((octet_length(content_hash) = 64)),
  CONSTRAINT petitions_moves CHECK (
CASE
    WHEN (came_from IS NULL) THEN (state = 'RECEIVED'::text)
    ELSE (((((((((came_from = 'RECEIVED'::text) AND (state = 'DELIBERATING'::text)) OR ((came_from = 'RECEIVED'::text) AND (state = 'ACKNOWLEDGED'::text))) OR ((came_from = 'RECEIVED'::text) AND (state = 'ESCALATED'::text))) OR ((came_from = 'DELIBERATING'::text) AND (state = 'ACKNOWLEDGED'::text))) OR ((came_from = 'DELIBERATING'::text) AND (state = 'REFERRED'::text))) OR ((came_from = 'DELIBERATING'::text) AND (state = 'ESCALATED'::text))) OR ((came_from = 'DELIBERATING'::text) AND (state = 'DEFERRED'::text))) OR ((came_from = 'DELIBERATING'::text) AND (state = 'NO_RESPONSE'::text)))
END),
  CONSTRAINT petitions_pkey PRIMARY KEY (id),
  CONSTRAINT petitions_realm_check CHECK (((char_length(realm) >= 1) AND (char_length(realm) <= 100))),
  CONSTRAINT petitions_text_check CHECK (((char_length(text) >= 1) AND (char_length(text) <= 10000))),
  CONSTRAINT petitions_type_check CHECK ((type = ANY (ARRAY['GENERAL'::text, 'CESSATION'::text, 'GRIEVANCE'::text, 'COLLABORATION'::text, 'META'::text])))
);
CREATE INDEX petitions_by_state ON spillway.petitions USING btree (state, id);

CREATE TABLE rates (
  key uuid NOT NULL,
  win integer NOT NULL,
  minutes integer[] NOT NULL,
  counts integer[] NOT NULL,
  total integer NOT NULL,
  expires_at timestamp with time zone NOT NULL,
  sweep_at timestamp with time zone NOT NULL,
  CONSTRAINT rates_pkey PRIMARY KEY (key)
) WITH (autovacuum_vacuum_cost_delay=0, autovacuum_vacuum_scale_factor=0.05, fillfactor=50);
CREATE INDEX rates_sweep ON spillway.rates USING btree (sweep_at);

CREATE TABLE ready (
  lane uuid NOT NULL,
  priority smallint NOT NULL,
  stamp bigint NOT NULL,
  type text NOT NULL,
  head bigint NOT NULL,
  depth bigint NOT NULL,
  careful boolean NOT NULL,
  queue text NOT NULL,
  partition text NOT NULL
) WITH (autovacuum_vacuum_cost_delay=0, autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=2000);
CREATE INDEX ready_order ON spillway.ready USING btree (priority, stamp);
CREATE INDEX ready_type ON spillway.ready USING btree (type, ((priority + 0)), stamp);

CREATE TABLE rt_blocks (
  type text NOT NULL,
  version text NOT NULL,
  body json NOT NULL,
  created_at timestamp with time zone NOT NULL,
  updated_at timestamp with time zone NOT NULL,
  CONSTRAINT rt_blocks_pkey PRIMARY KEY (type, version),
  CONSTRAINT rt_blocks_type_check CHECK ((type <> ''::text)),
  CONSTRAINT rt_blocks_version_check CHECK ((version <> ''::text))
);

CREATE TABLE rt_burials (
  ticket uuid NOT NULL,
  letter text NOT NULL,
  error text NOT NULL,
  told boolean DEFAULT false NOT NULL,
  expires_at timestamp with time zone NOT NULL,
  CONSTRAINT rt_burials_pkey PRIMARY KEY (ticket)
);
CREATE INDEX rt_burials_expires ON spillway.rt_burials USING btree (expires_at);

CREATE TABLE rt_decisions (
  request uuid NOT NULL,
  tenant text NOT NULL,
  decision json NOT NULL,
  trace_id text NOT NULL,
  decided_at timestamp with time zone NOT NULL,
  expires_at timestamp with time zone NOT NULL,
  CONSTRAINT rt_decisions_pkey PRIMARY KEY (request, tenant)
) WITH (autovacuum_vacuum_scale_factor=0.02, autovacuum_vacuum_threshold=5000);
CREATE INDEX rt_decisions_expires ON spillway.rt_decisions USING btree (expires_at);

CREATE TABLE rt_keys (
  key uuid NOT NULL,
  task uuid NOT NULL,
  decision json NOT NULL,
  expires_at timestamp with time zone NOT NULL,
  CONSTRAINT rt_keys_pkey PRIMARY KEY (key)
) WITH (autovacuum_vacuum_scale_factor=0.02, autovacuum_vacuum_threshold=5000);
CREATE INDEX rt_keys_expires ON spillway.rt_keys USING btree (expires_at);

CREATE TABLE rt_policies (
  tenant text NOT NULL,
  id text NOT NULL,
  body json NOT NULL,
  version integer DEFAULT 1 NOT NULL,
  change bigint NOT NULL,
  updated_at timestamp with time zone NOT NULL,
  CONSTRAINT rt_policies_id_check CHECK ((id <> ''::text)),
  CONSTRAINT rt_policies_pkey PRIMARY KEY (tenant, id),
  CONSTRAINT rt_policies_version_check CHECK ((version > 0))
);
CREATE UNIQUE INDEX rt_policies_change ON spillway.rt_policies USING btree (change);

CREATE TABLE rt_state (
  one boolean DEFAULT true NOT NULL,
  change bigint DEFAULT 0 NOT NULL,
  removals bigint DEFAULT 0 NOT NULL,
  policies integer DEFAULT 0 NOT NULL,
  blocks integer DEFAULT 0 NOT NULL,
  CONSTRAINT rt_state_blocks_check CHECK ((blocks >= 0)),
  CONSTRAINT rt_state_one_check CHECK (one),
  CONSTRAINT rt_state_pkey PRIMARY KEY (one),
  CONSTRAINT rt_state_policies_check CHECK ((policies >= 0))
) WITH (fillfactor=50);

CREATE TABLE stream_chunks (
  stream uuid NOT NULL,
  born_at timestamp with time zone NOT NULL,
  first integer NOT NULL,
  last integer NOT NULL,
  writer text NOT NULL,
  chunks text NOT NULL,
  ended text,
  CONSTRAINT stream_chunks_check CHECK ((last >= first)),
  CONSTRAINT stream_chunks_ended_check CHECK ((ended = ANY (ARRAY['done'::text, 'error'::text, 'cancelled'::text, 'unbegun'::text]))),
  CONSTRAINT stream_chunks_first_check CHECK ((first >= 1)),
  CONSTRAINT stream_chunks_pkey PRIMARY KEY (stream, first, born_at)
) PARTITION BY RANGE (born_at);

CREATE TABLE stream_chunks_rest PARTITION OF stream_chunks DEFAULT;

CREATE TABLE stream_look (
  one boolean DEFAULT true NOT NULL,
  next_at timestamp with time zone NOT NULL,
  CONSTRAINT stream_look_one_check CHECK (one),
  CONSTRAINT stream_look_pkey PRIMARY KEY (one)
) WITH (fillfactor=50);

CREATE TABLE stream_spans (
  name text NOT NULL,
  from_at timestamp with time zone NOT NULL,
  to_at timestamp with time zone NOT NULL,
  CONSTRAINT stream_spans_pkey PRIMARY KEY (name)
);

CREATE TABLE streams (
  id uuid NOT NULL,
  identity text NOT NULL,
  format text NOT NULL,
  thread_id text NOT NULL,
  log text NOT NULL,
  born_at timestamp with time zone NOT NULL,
  direct boolean NOT NULL,
  watcher uuid,
  unwatched_at timestamp with time zone,
  ended text,
  ended_at timestamp with time zone,
  CONSTRAINT streams_born_at_check CHECK ((born_at = date_trunc('milliseconds'::text, born_at))),
  CONSTRAINT streams_check CHECK (((watcher IS NULL) = (unwatched_at IS NOT NULL))),
  CONSTRAINT streams_check1 CHECK (((ended IS NULL) = (ended_at IS NULL))),
  CONSTRAINT streams_ended_check CHECK ((ended = ANY (ARRAY['done'::text, 'error'::text, 'cancelled'::text, 'unbegun'::text]))),
  CONSTRAINT streams_format_check CHECK ((format = ANY (ARRAY['openai'::text, 'native'::text]))),
  CONSTRAINT streams_log_check CHECK ((log = ANY (ARRAY['postgres'::text, 'redis'::text]))),
  CONSTRAINT streams_pkey PRIMARY KEY (id)
) WITH (autovacuum_vacuum_scale_factor=0.05, fillfactor=80);
CREATE INDEX streams_born ON spillway.streams USING btree (born_at);
CREATE INDEX streams_ended ON spillway.streams USING btree (ended_at) WHERE (ended_at IS NOT NULL);
CREATE INDEX streams_open ON spillway.streams USING btree (born_at) WHERE (ended_at IS NULL);

CREATE TABLE sweep_turn (
  one boolean DEFAULT true NOT NULL,
  next_at timestamp with time zone NOT NULL,
  CONSTRAINT sweep_turn_one_check CHECK (one),
  CONSTRAINT sweep_turn_pkey PRIMARY KEY (one)
) WITH (fillfactor=50);

CREATE TABLE tallies (
  worker uuid NOT NULL,
  part smallint NOT NULL,
  type text NOT NULL,
  n bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=1000, fillfactor=50);
CREATE INDEX tallies_shared ON spillway.tallies USING btree (type) WHERE (part < 0);
CREATE UNIQUE INDEX tallies_writer ON spillway.tallies USING btree (worker, part, type) WHERE (part >= 0);

CREATE TABLE workers (
  id uuid NOT NULL,
  name text NOT NULL,
  started_at timestamp with time zone NOT NULL,
  until timestamp with time zone NOT NULL,
  running json DEFAULT '{}'::json NOT NULL,
  announced jsonb DEFAULT '{}'::jsonb NOT NULL,
  CONSTRAINT workers_pkey PRIMARY KEY (id)
) WITH (fillfactor=50);

CREATE OR REPLACE FUNCTION spillway.accept(p_worker uuid, p_part smallint, p_apply boolean, p_lanes uuid[], p_queues text[], p_partitions text[], p_counts bigint[], p_may_run boolean[], p_lane integer[], p_rn bigint[], p_id uuid[], p_type text[], p_priority smallint[], p_stamp bigint[], p_lead bigint[], p_identity text[], p_payload text[], p_delay_ms bigint[], p_max_attempts integer[], p_timeout_ms integer[], p_trace text[], p_reason text[], p_pace_ms real[], p_backlog_ms bigint, p_keys uuid[], p_requests uuid[], p_key_ttl_ms bigint, p_gates text[], p_halts text[], p_rate_key uuid[], p_rate_asked integer[], p_rate_limit integer[], p_rate_minutes integer[], p_rate_keep integer[], p_rate_ix integer[], p_rate_item integer[], p_full boolean, p_batch integer[], OUT verdicts text[], OUT fence bigint, OUT seqs bigint[], OUT places bigint[], OUT waits_ms bigint[], OUT reasons text[], OUT stamps bigint[], OUT answers json[], OUT ops uuid[], OUT tiers integer[], OUT rates_left bigint[], OUT rates_reset_ms bigint[], OUT at_ms bigint)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
 SET plan_cache_mode TO 'force_generic_plan'
 SET jit TO 'off'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_decided text[];
  v_lanes uuid[] := p_lanes; v_queues text[] := p_queues; v_partitions text[] := p_partitions;
  v_counts bigint[] := p_counts; v_may_run boolean[] := p_may_run; v_lane int[] := p_lane; v_rn bigint[] := p_rn;
  v_may_lease boolean := false; v_paused boolean;
  k record; g record; n record; l record; d record;
BEGIN
  -- Its row stays until we commit, so that a process that may hold leases keeps that right.
  IF NOT p_apply AND p_reason && '{"",+requested,+still_running}' THEN
    PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
    v_may_lease := FOUND;
  END IF;
  IF cardinality(p_keys) > 0 THEN
    k := idempotency_take(p_keys, p_requests, p_id, p_batch, t, p_key_ttl_ms);
    v_decided := k.verdicts; answers := k.answers; ops := k.ops;
  END IF;
  IF cardinality(p_halts) > 0 THEN v_decided := halts_check(p_halts, v_decided); END IF;
  IF p_full THEN
    v_decided := depth_check(p_batch, p_lane, p_reason, v_decided, p_lanes, p_queues, p_partitions, p_type[1]);
  END IF;
  IF cardinality(p_gates) > 0 OR cardinality(p_rate_key) > 0 THEN
    g := gates_take(p_gates, p_rate_key, p_rate_asked, p_rate_limit, p_rate_minutes, p_rate_keep, p_rate_ix,
      p_rate_item, v_decided, cardinality(p_id), t);
    v_decided := g.verdicts;
    tiers := g.tiers; rates_left := g.rates_left; rates_reset_ms := g.rates_reset_ms; at_ms := g.at_ms;
  END IF;
  IF v_decided IS NOT NULL AND cardinality(p_keys) > 0 THEN PERFORM idempotency_release(p_keys, v_decided); END IF;

  IF v_decided IS NOT NULL THEN
    n := lanes_count(p_lanes, p_queues, p_partitions, p_lane, p_reason, v_decided);
    v_lanes := n.ids; v_queues := n.queues; v_partitions := n.partitions; v_counts := n.counts; v_may_run := n.may_run;
    v_lane := n.lane; v_rn := n.rn;
  END IF;
  v_paused := EXISTS (SELECT FROM pauses);
  IF NOT v_may_lease AND NOT p_apply THEN
    v_may_run := array_fill(false, ARRAY[coalesce(cardinality(v_lanes), 0)]);
  ELSIF v_paused THEN
    v_may_run := pause_check(v_queues, v_partitions, v_may_run, CASE WHEN p_apply THEN p_type[1] END);
  END IF;
  l := lanes_append(v_lanes, v_queues, v_partitions, v_counts, v_may_run, p_apply, t);
  d := verdicts_decide(p_apply, v_may_lease, v_paused, p_backlog_ms, v_lane, v_rn, p_priority, p_stamp, p_lead,
    p_delay_ms, p_reason, p_pace_ms, v_decided, v_counts, l.tails, l.depths, l.running, l.paces, l.blocked);
  verdicts := d.verdicts; seqs := d.seqs; places := d.places; waits_ms := d.waits_ms; reasons := d.reasons;
  stamps := d.stamps;

  INSERT INTO ops (lane, seq, id, type, priority, stamp, identity, payload, accepted_at, not_before, started_at,
      max_attempts, timeout_ms, trace, idem, gate)
    SELECT v_lanes[u.lane], u.seq, u.id, u.type, u.priority, u.stamp, u.identity, u.payload::json, t,
      CASE WHEN u.delay_ms > 0 THEN t + u.delay_ms * interval '1 ms' END, CASE WHEN u.verdict = 'execute' THEN t END,
      u.max_attempts, u.timeout_ms, u.trace, u.key, u.gate
    FROM unnest(v_lane, verdicts, seqs, stamps, p_id, p_type, p_priority, p_identity, p_payload, p_delay_ms,
        p_max_attempts, p_timeout_ms, p_trace, p_keys, p_gates)
      u(lane, verdict, seq, stamp, id, type, priority, identity, payload, delay_ms, max_attempts, timeout_ms, trace,
        key, gate)
    WHERE u.verdict IN ('queue', 'execute');
  IF d.starts_lanes THEN
    PERFORM lanes_ready(v_lanes, v_queues, v_partitions, v_counts, l.depths, v_lane, v_rn, verdicts, p_priority, stamps,
      p_delay_ms, p_type, seqs, t);
  END IF;
  IF 'execute' = ANY (verdicts) THEN fence := lease_take(p_worker, v_lanes, v_lane, verdicts, seqs, t); END IF;
  IF cardinality(p_keys) > 0 THEN PERFORM idempotency_answer(p_keys, verdicts, places, waits_ms, reasons); END IF;
  PERFORM tally_accepted(p_worker, p_part, p_type, verdicts, d.accepted);
END $function$;

CREATE OR REPLACE FUNCTION spillway.alert_report(p_key uuid, p_id uuid, p_name text, p_labels json, p_status text, p_severity text, p_message text, p_annotations json, p_reporter uuid, p_hold_ms bigint, p_delivery text)
 RETURNS timestamp with time zone
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := date_trunc('milliseconds', clock());
  v_status text; v_seq bigint;
BEGIN
  IF p_status = 'firing' THEN
    -- The first of its kind; one that comes at the same time waits here for the other's commit.
    INSERT INTO alert_states (key, name, labels, status, severity, message, annotations, alert, seq, at)
      VALUES (p_key, p_name, p_labels, 'resolved', p_severity, p_message, p_annotations, p_id, 0, t)
        ON CONFLICT (key) DO NOTHING;
  END IF;
  SELECT s.status INTO v_status FROM alert_states s WHERE s.key = p_key FOR UPDATE;
  IF NOT FOUND THEN RETURN NULL; END IF;
  IF p_status = 'firing' THEN
    INSERT INTO alert_reporters (key, reporter, until) VALUES (p_key, p_reporter, t + p_hold_ms * interval '1 ms')
      ON CONFLICT (key, reporter) DO UPDATE SET until = EXCLUDED.until;
  ELSE
    DELETE FROM alert_reporters r WHERE r.key = p_key AND (r.reporter = p_reporter OR r.until <= t);
    IF EXISTS (SELECT FROM alert_reporters r WHERE r.key = p_key) THEN RETURN NULL; END IF;
  END IF;
  IF v_status = p_status THEN
    IF p_status = 'firing' THEN
      UPDATE alert_states s SET severity = p_severity, message = p_message, annotations = p_annotations
        WHERE s.key = p_key;
    END IF;
    RETURN NULL;
  END IF;
  INSERT INTO alerts (id, key, name, labels, status, severity, message, annotations, at, delivery)
    VALUES (p_id, p_key, p_name, p_labels, p_status, p_severity, p_message, p_annotations, t, p_delivery)
      RETURNING seq INTO v_seq;
  UPDATE alert_states s
    SET status = p_status, severity = p_severity, message = p_message, annotations = p_annotations, alert = p_id,
      seq = v_seq, at = t
    WHERE s.key = p_key;
  RETURN t;
END $function$;

CREATE OR REPLACE FUNCTION spillway.alert_shed(p_most integer)
 RETURNS TABLE(id uuid, name text, status text, operation uuid)
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_seqs bigint[];
BEGIN
  WHILE (SELECT count(*) FROM alerts a WHERE a.delivery = 'waiting') > p_most LOOP
    SELECT array_remove(ARRAY[w.seq, w.next], NULL) INTO v_seqs FROM (
      SELECT a.seq, a.status, a.attempts, lead(a.seq) OVER (PARTITION BY a.key ORDER BY a.seq) AS next
      FROM alerts a WHERE a.delivery = 'waiting'
    ) w WHERE w.attempts = 0 ORDER BY w.next IS NULL, w.status <> 'firing', w.seq LIMIT 1;
    EXIT WHEN v_seqs IS NULL;
    -- Its delivery may begin at this moment: once both are locked it is known.
    PERFORM FROM alerts a WHERE a.seq = ANY (v_seqs) ORDER BY a.seq FOR UPDATE;
    CONTINUE WHEN EXISTS (SELECT FROM alerts a
        WHERE a.seq = ANY (v_seqs) AND (a.attempts > 0 OR a.delivery <> 'waiting'));
    RETURN QUERY UPDATE alerts a SET delivery = 'dropped' WHERE a.seq = ANY (v_seqs)
      RETURNING a.id, a.name, a.status, a.operation;
  END LOOP;
END $function$;

CREATE OR REPLACE FUNCTION spillway.alert_sweep(p_days integer, p_rows integer, p_most integer)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_n int;
BEGIN
  IF NOT pg_try_advisory_xact_lock(hashtext('spillway.alert_sweep'), hashtext(current_schema())) THEN
    RETURN NULL;
  END IF;
  UPDATE alerts a SET delivery = 'failed'
    WHERE a.delivery = 'waiting' AND NOT EXISTS (SELECT FROM ops o WHERE o.id = a.operation);
  DELETE FROM alerts d WHERE d.seq = ANY (ARRAY(SELECT a.seq FROM alerts a WHERE a.delivery <> 'waiting'
    AND (a.at < t - make_interval(days => p_days) OR a.seq <= (SELECT b.seq FROM alerts b
          ORDER BY b.seq DESC OFFSET p_rows LIMIT 1)) ORDER BY a.seq LIMIT p_most));
  GET DIAGNOSTICS v_n = ROW_COUNT;
  DELETE FROM alert_states s WHERE s.status = 'resolved' AND s.at < t - make_interval(days => p_days);
  RETURN v_n;
END $function$;

CREATE OR REPLACE FUNCTION spillway.audit()
 RETURNS TABLE(fault text)
 LANGUAGE sql
 SET search_path TO 'spillway'
AS $function$
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
$function$;

CREATE OR REPLACE FUNCTION spillway.bury(p_lane uuid, p_seq bigint, p_error text)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  WITH gone AS (DELETE FROM ops o WHERE o.lane = p_lane AND o.seq = p_seq RETURNING o.*)
  INSERT INTO dead_letters (id, died_at, lane, seq, queue, partition, type, priority, identity, payload, accepted_at,
      started_at, attempts, max_attempts, timeout_ms, error, trace, gate)
  SELECT g.id, t, g.lane, g.seq, l.queue, l.partition, g.type, g.priority, g.identity, g.payload, g.accepted_at,
    g.started_at, g.attempts, g.max_attempts, g.timeout_ms, p_error, g.trace, g.gate
  FROM gone g JOIN lanes l ON l.id = g.lane;
  UPDATE lanes l SET head = greatest(l.head, p_seq), depth = l.depth - 1, moved_at = t WHERE l.id = p_lane;
END $function$;

CREATE OR REPLACE FUNCTION spillway.cancel(p_id uuid, p_abortable text[], p_why text)
 RETURNS text
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  o record; f record;
  v_at tid; v_upto bigint; v_where text; v_depth bigint;
BEGIN
  PERFORM pause_guard();
  SELECT x.lane, x.seq, x.type, x.idem, x.gate INTO o FROM ops x WHERE x.id = p_id;
  IF NOT FOUND THEN RETURN 'gone'; END IF;
  PERFORM FROM idempotency d WHERE d.key = o.idem FOR UPDATE;
  PERFORM FROM gates g WHERE g.name = o.gate FOR UPDATE;
  PERFORM FROM lanes l WHERE l.id = o.lane FOR UPDATE;
  SELECT x.seq INTO o.seq FROM ops x WHERE x.id = p_id FOR UPDATE;
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
      max_attempts, error, trace)
    SELECT g.id, t, 'cancelled', g.type, l.queue, l.partition, g.priority, g.identity, g.accepted_at, g.attempts,
      g.max_attempts, p_why, g.trace
    FROM gone g JOIN lanes l ON l.id = g.lane;
  UPDATE lanes l
    SET depth = l.depth - 1, head = CASE WHEN f.seq = o.seq AND v_where <> 'leased' THEN o.seq ELSE l.head END
    WHERE l.id = o.lane RETURNING l.depth INTO v_depth;
  IF v_where <> 'leased' AND f.seq = o.seq THEN
    DELETE FROM ready x WHERE x.ctid = v_at AND v_where = 'ready';
    DELETE FROM parked x WHERE x.lane = o.lane AND v_where = 'parked';
    IF v_depth > 0 THEN PERFORM lane_requeue(o.lane); END IF;
  END IF;
  IF o.idem IS NOT NULL THEN
    UPDATE idempotency d SET answer = json_build_object('v', 'cancelled')
      WHERE d.key = o.idem AND d.op = p_id AND d.answer IS NULL;
  END IF;
  IF o.gate IS NOT NULL THEN PERFORM gates_release(ARRAY[o.gate], ARRAY[1::bigint]); END IF;
  PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, o.type, -1);
  RETURN 'cancelled';
END $function$;

CREATE OR REPLACE FUNCTION spillway.capacity_hold(p_names text[], p_gave bigint[], p_at timestamp with time zone)
 RETURNS void
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
BEGIN
  UPDATE gates x SET held = x.held + u.gave, overflowing = x.overflowing OR x.held + u.gave >= x.full_at,
      changed_at = CASE WHEN NOT x.overflowing AND x.held + u.gave >= x.full_at THEN p_at ELSE x.changed_at END
    FROM unnest(p_names, p_gave) u(name, gave) WHERE x.name = u.name AND u.gave > 0;
END $function$;

CREATE OR REPLACE FUNCTION spillway.capacity_take(p_gates text[], p_decided text[], OUT names text[], OUT left_now bigint[], OUT asked bigint[], OUT is_tight boolean)
 RETURNS record
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.claim(p_worker uuid, p_want integer, p_budget integer, p_each integer, p_turn smallint, p_types text[], p_together text[], p_trusted text[], OUT fence bigint, OUT depth bigint, OUT lanes text, OUT queues json, OUT partitions json, OUT careful text, OUT ixs text, OUT seqs text, OUT ids text, OUT types text, OUT priorities text, OUT identities json, OUT payloads text, OUT waited_ms text, OUT due text, OUT attempts text, OUT max_attempts text, OUT timeouts_ms text, OUT traces json, OUT idems text, OUT gates json)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET jit TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
    string_agg(o.priority::text, ','),
      array_agg(o.identity), string_agg(o.payload::text, E'\x1e'),
        string_agg((date_part('epoch', t - o.accepted_at) * 1000)::bigint::text, ','),
      string_agg(CASE WHEN o.not_before > t OR h.held THEN '0' ELSE '1' END, ','), string_agg(o.attempts::text, ','),
        string_agg(o.max_attempts::text, ','),
      string_agg(o.timeout_ms::text, ','), array_agg(o.trace), string_agg(coalesce(o.idem::text, ''), ','),
        array_agg(o.gate), bool_or(o.gate IS NOT NULL)
    INTO v_ixs, v_seqs, ids, types, priorities, v_identities, payloads, waited_ms, due, attempts, max_attempts,
      timeouts_ms, v_traces, idems, v_gates, v_gated
  FROM unnest(v_lanes, v_types, v_heads, v_careful, v_held) WITH ORDINALITY h(lane, type, head, careful, held, ix),
    LATERAL (
      SELECT x.seq, x.id, x.type, x.priority, x.identity, x.payload, x.accepted_at, x.not_before, x.attempts,
        x.max_attempts, x.timeout_ms, x.trace, x.idem, x.gate
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.clock()
 RETURNS timestamp with time zone
 LANGUAGE sql
AS $function$ SELECT clock_timestamp() $function$;

CREATE OR REPLACE FUNCTION spillway.confirm(p_worker uuid, p_fence bigint, p_lane uuid, p_seq bigint)
 RETURNS text
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
BEGIN
  PERFORM FROM leases l WHERE l.fence = p_fence AND l.worker = p_worker AND p_lane = ANY (l.lanes) FOR UPDATE;
  IF NOT FOUND THEN RETURN 'lost'; END IF;
  RETURN CASE WHEN EXISTS (SELECT FROM ops o WHERE o.lane = p_lane AND o.seq = p_seq) THEN 'pending' ELSE 'left' END;
END $function$;

CREATE OR REPLACE FUNCTION spillway.connections_change(p_worker uuid, p_pool text, p_seq bigint, p_held text[], p_counts integer[], p_gives text[], p_takes text[], p_each integer[], p_all integer[])
 RETURNS smallint[]
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_out smallint[] := '{}'; v_total bigint; v_mine bigint; r record;
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
      v_out := v_out || 1::smallint;
    ELSIF v_total >= r.all_max THEN
      v_out := v_out || 2::smallint;
    ELSE
      INSERT INTO connections AS c (pool, identity, worker, held) VALUES (p_pool, r.who, p_worker, 1)
        ON CONFLICT (pool, identity, worker) DO UPDATE SET held = c.held + 1;
      v_total := v_total + 1;
      v_out := v_out || 0::smallint;
    END IF;
  END LOOP;
  RETURN v_out;
END $function$;

CREATE OR REPLACE FUNCTION spillway.depth_check(p_batch integer[], p_lane integer[], p_reason text[], p_decided text[], p_lanes uuid[], p_queues text[], p_partitions text[], p_type text)
 RETURNS text[]
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.disown(p_worker uuid, p_known bigint[])
 RETURNS integer
 LANGUAGE sql
 SET search_path TO 'spillway'
AS $function$
  SELECT leases_return((SELECT coalesce(array_agg(l.fence), '{}') FROM leases l
    WHERE l.worker = p_worker AND NOT l.fence = ANY (p_known) AND l.claimed_at < clock() - interval '12 seconds'),
    false)
$function$;

CREATE OR REPLACE FUNCTION spillway.enlist(p_worker uuid, p_name text, p_lease_ms bigint, p_announced jsonb)
 RETURNS void
 LANGUAGE sql
 SET search_path TO 'spillway'
AS $function$
  INSERT INTO workers (id, name, started_at, until, announced)
    VALUES (p_worker, p_name, clock(), clock() + p_lease_ms * interval '1 ms', p_announced)
$function$;

CREATE OR REPLACE FUNCTION spillway.fences_check(p_worker uuid, p_fences bigint[], p_lanes uuid[])
 RETURNS bigint[]
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.gate_register(p_name text, p_full_at bigint, p_resume_below bigint)
 RETURNS void
 LANGUAGE sql
 SET search_path TO 'spillway'
AS $function$
  INSERT INTO gates AS g (name, full_at, resume_below, changed_at) VALUES (p_name, p_full_at, p_resume_below, clock())
  ON CONFLICT (name) DO UPDATE SET full_at = excluded.full_at, resume_below = excluded.resume_below,
    overflowing = g.held >= excluded.full_at OR (g.overflowing AND g.held >= excluded.resume_below)
  WHERE (g.full_at, g.resume_below) IS DISTINCT FROM (excluded.full_at, excluded.resume_below)
$function$;

CREATE OR REPLACE FUNCTION spillway.gates_release(p_names text[], p_counts bigint[])
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.gates_take(p_gates text[], p_rate_key uuid[], p_rate_asked integer[], p_rate_limit integer[], p_rate_minutes integer[], p_rate_keep integer[], p_rate_ix integer[], p_rate_item integer[], p_decided text[], p_items integer, p_at timestamp with time zone, OUT verdicts text[], OUT tiers integer[], OUT rates_left bigint[], OUT rates_reset_ms bigint[], OUT at_ms bigint)
 RETURNS record
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.halt_set(p_scope text, p_reason text)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtext('spillway.halts'), hashtext(current_schema()));
  INSERT INTO halts (scope, reason, since) VALUES (p_scope, p_reason, clock()) ON CONFLICT (scope) DO NOTHING;
  RETURN FOUND;
END $function$;

CREATE OR REPLACE FUNCTION spillway.halts_check(p_scopes text[], p_decided text[])
 RETURNS text[]
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.idempotency_answer(p_keys uuid[], p_verdicts text[], p_places bigint[], p_waits_ms bigint[], p_reasons text[])
 RETURNS void
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
BEGIN
  UPDATE idempotency d
    SET answer = json_build_object('v', 'queue', 'place', u.place, 'wait_ms', u.wait_ms, 'reason', u.reason)
    FROM unnest(p_keys, p_verdicts, p_places, p_waits_ms, p_reasons) u(key, verdict, place, wait_ms, reason)
    WHERE (u.verdict = 'queue' OR u.verdict = 'execute' AND u.reason IN ('requested', 'still_running'))
      AND d.key = u.key;
END $function$;

CREATE OR REPLACE FUNCTION spillway.idempotency_release(p_keys uuid[], p_verdicts text[])
 RETURNS void
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
BEGIN
  DELETE FROM idempotency d USING unnest(p_keys, p_verdicts) u(key, verdict)
    WHERE d.key = u.key AND u.verdict IN ('capacity_full', 'rate_limited', 'halted', 'depth_full');
END $function$;

CREATE OR REPLACE FUNCTION spillway.idempotency_settle(r_lane uuid[], r_seq bigint[], r_key uuid[], r_answer text[])
 RETURNS void
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
BEGIN
  UPDATE idempotency d SET answer = u.answer::json
    FROM (
      SELECT x.key, x.answer, o.id FROM unnest(r_lane, r_seq, r_key, r_answer) x(lane, seq, key, answer)
      JOIN ops o ON o.lane = x.lane AND o.seq = x.seq WHERE x.key IS NOT NULL ORDER BY x.key OFFSET 0
    ) u
    WHERE d.key = u.key AND d.op = u.id AND d.answer IS NULL;
END $function$;

CREATE OR REPLACE FUNCTION spillway.idempotency_take(p_keys uuid[], p_requests uuid[], p_ops uuid[], p_batch integer[], p_at timestamp with time zone, p_ttl_ms bigint, OUT verdicts text[], OUT answers json[], OUT ops uuid[])
 RETURNS record
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.keys_applied(p_keys uuid[], p_ids uuid[], p_verdicts text[], p_results json[])
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.lane_paused(p_lane uuid)
 RETURNS boolean
 LANGUAGE sql
 STABLE
 SET search_path TO 'spillway'
AS $function$
  SELECT EXISTS (SELECT FROM lanes l JOIN pauses p ON CASE WHEN p.queue = ''
      THEN p.partition = (SELECT x.type FROM ops x WHERE x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1)
      ELSE p.queue = l.queue AND (p.partition IS NULL OR p.partition = l.partition) END WHERE l.id = p_lane)
$function$;

CREATE OR REPLACE FUNCTION spillway.lane_requeue(p_lane uuid)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  o record;
BEGIN
  SELECT x.priority, x.stamp, x.type, x.not_before, l.head, l.depth, l.careful > l.head AS careful, l.queue,
    l.partition INTO o FROM lanes l, ops x
    WHERE l.id = p_lane AND x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1;
  IF NOT FOUND THEN
    RETURN;
  ELSIF lane_paused(p_lane) THEN
    INSERT INTO parked (lane, until, reason) VALUES (p_lane, 'infinity', 'pause');
  ELSIF o.not_before > t THEN
    INSERT INTO parked (lane, until, reason) VALUES (p_lane, o.not_before, 'delay');
  ELSE
    INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
      VALUES (p_lane, o.priority, o.stamp, o.type, o.head, o.depth, o.careful, o.queue, o.partition);
  END IF;
END $function$;

CREATE OR REPLACE FUNCTION spillway.lanes_advance(p_lanes uuid[], p_heads bigint[], p_left bigint[], p_at timestamp with time zone, OUT queues text[], OUT partitions text[], OUT heads bigint[], OUT depths bigint[], OUT careful boolean[], OUT has_more boolean, OUT has_emptied boolean)
 RETURNS record
 LANGUAGE plpgsql
AS $function$
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
    RETURNING l.queue, l.partition, l.head, l.depth, l.careful > l.head AS careful
  )
  SELECT array_agg(m.queue), array_agg(m.partition), array_agg(m.head), array_agg(m.depth), array_agg(m.careful),
      bool_or(m.depth > 0), bool_or(m.depth = 0)
    INTO queues, partitions, heads, depths, careful, has_more, has_emptied FROM moved m;
END $function$;

CREATE OR REPLACE FUNCTION spillway.lanes_append(p_ids uuid[], p_queues text[], p_partitions text[], p_counts bigint[], p_may_run boolean[], p_apply boolean, p_at timestamp with time zone, OUT tails bigint[], OUT depths bigint[], OUT running integer[], OUT paces real[], OUT blocked bigint[])
 RETURNS record
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.lanes_count(p_lanes uuid[], p_queues text[], p_partitions text[], p_lane integer[], p_reason text[], p_decided text[], OUT ids uuid[], OUT queues text[], OUT partitions text[], OUT counts bigint[], OUT may_run boolean[], OUT lane integer[], OUT rn bigint[])
 RETURNS record
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.lanes_ready(p_ids uuid[], p_queues text[], p_partitions text[], p_counts bigint[], p_depths bigint[], p_lane integer[], p_rn bigint[], p_verdicts text[], p_priority smallint[], p_stamps bigint[], p_delay_ms bigint[], p_type text[], p_seqs bigint[], p_at timestamp with time zone)
 RETURNS void
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
BEGIN
  INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
    SELECT p_ids[u.lane], u.priority, u.stamp, u.type, u.seq - 1, p_depths[u.lane], false, p_queues[u.lane],
      p_partitions[u.lane]
    FROM unnest(p_lane, p_rn, p_verdicts, p_priority, p_stamps, p_delay_ms, p_type, p_seqs)
      u(lane, rn, verdict, priority, stamp, delay_ms, type, seq)
    WHERE u.rn = 1 AND u.verdict = 'queue' AND u.delay_ms = 0 AND p_depths[u.lane] = p_counts[u.lane];
  IF 0 < ANY (p_delay_ms) THEN
    INSERT INTO parked (lane, until, reason)
      SELECT p_ids[u.lane], p_at + u.delay_ms * interval '1 ms', 'delay'
      FROM unnest(p_lane, p_rn, p_verdicts, p_delay_ms) u(lane, rn, verdict, delay_ms)
      WHERE u.rn = 1 AND u.verdict = 'queue' AND u.delay_ms > 0 AND p_depths[u.lane] = p_counts[u.lane];
  END IF;
END $function$;

CREATE OR REPLACE FUNCTION spillway.lanes_release(p_lanes uuid[], p_release boolean[], p_retry_ms bigint[], p_queues text[], p_partitions text[], p_heads bigint[], p_depths bigint[], p_careful boolean[], p_labels text[], p_paused boolean, p_at timestamp with time zone)
 RETURNS void
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.lease_take(p_worker uuid, p_ids uuid[], p_lane integer[], p_verdicts text[], p_seqs bigint[], p_at timestamp with time zone)
 RETURNS bigint
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
DECLARE
  v_fence bigint := nextval('fences');
BEGIN
  INSERT INTO leases (fence, worker, lanes, uptos, claimed_at)
    SELECT v_fence, p_worker, array_agg(p_ids[u.lane]), array_agg(u.seq), p_at
    FROM unnest(p_lane, p_verdicts, p_seqs) u(lane, verdict, seq) WHERE u.verdict = 'execute';
  RETURN v_fence;
END $function$;

CREATE OR REPLACE FUNCTION spillway.leases_return(p_fences bigint[], p_charge boolean)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  r record; o record;
  v_lanes uuid[]; v_uptos bigint[]; v_n int := 0;
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
  RETURN v_n;
END $function$;

CREATE OR REPLACE FUNCTION spillway.leases_shrink(p_fences bigint[], p_lanes uuid[], p_release boolean[])
 RETURNS void
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.ledger_append(p_types text[], p_actors text[], p_traces text[], p_payloads text[])
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.ledger_check(p_after bigint, p_prev text, p_rows integer)
 RETURNS TABLE(seen bigint, last_seq bigint, last_hash text, broken_at bigint)
 LANGUAGE sql
 STABLE
 SET search_path TO 'spillway'
AS $function$
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
$function$;

CREATE OR REPLACE FUNCTION spillway.ledger_form_before(p_time text, p_actor text, p_payload text)
 RETURNS text
 LANGUAGE sql
 STABLE
AS $function$
  SELECT '{"actor":' || to_json(p_actor)::text || ',"at":"' || p_time || '","payload":' || p_payload || ',"prev_hash":"'
$function$;

CREATE OR REPLACE FUNCTION spillway.ledger_form_behind(p_seq bigint, p_type text, p_trace_id text)
 RETURNS text
 LANGUAGE sql
 STABLE
AS $function$
  SELECT '","seq":' || p_seq || ',"trace_id":' || to_json(p_trace_id)::text || ',"type":' || to_json(p_type)::text
    || '}'
$function$;

CREATE OR REPLACE FUNCTION spillway.ledger_refuse()
 RETURNS trigger
 LANGUAGE plpgsql
AS $function$
BEGIN
  RAISE EXCEPTION 'the ledger is append-only: % is refused', TG_OP USING ERRCODE = '42501';
END $function$;

CREATE OR REPLACE FUNCTION spillway.ledger_time(p_at timestamp with time zone)
 RETURNS text
 LANGUAGE sql
 STABLE
AS $function$
  SELECT CASE WHEN p_at = date_trunc('milliseconds', p_at) AND p_at >= '0001-01-01 00:00:00Z'
    AND p_at < '10000-01-01 00:00:00Z'
    THEN to_char(p_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') ELSE p_at::text END
$function$;

CREATE OR REPLACE FUNCTION spillway.mark(p_worker uuid, m_fence bigint[], m_lane uuid[], m_seq bigint[], m_ago_ms bigint[])
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_ack(p_partitions uuid[], p_groups text[], p_leases uuid[], p_transactions text[], p_statuses text[], p_errors text[])
 RETURNS text[]
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
 SET plan_cache_mode TO 'force_generic_plan'
 SET jit TO 'off'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  outcomes text[] := array_fill('unknown'::text, ARRAY[cardinality(p_partitions)]);
  r record; a record; c mq_cursors; v_limit int; v_delay int; v_letters boolean; v_grp int; v_live boolean;
  v_buried bigint[]; v_why text[]; v_letter bigint[]; v_letter_why text[]; v_n int; v_done int; v_seqs bigint[];
  v_leases uuid[] := '{}'; v_parts uuid[] := '{}';
BEGIN
  FOR r IN
    SELECT u.part, u.grp, array_agg(u.i::int) AS ixs, array_agg(u.tx) AS txs, array_agg(u.lease) AS leases,
      array_agg(u.status) AS statuses, array_agg(u.error) AS errors
           FROM unnest(p_partitions, p_groups, p_transactions, p_leases, p_statuses,
               p_errors) WITH ORDINALITY u(part, grp, tx, lease, status, error, i)
           GROUP BY u.part, u.grp ORDER BY u.part, u.grp LOOP
    SELECT g.id, q.retry_limit, q.retry_delay_ms, q.dead_letter_queue OR q.dlq_after_max_retries
      INTO v_grp, v_limit, v_delay, v_letters
      FROM mq_partitions p JOIN mq_queues q ON q.id = p.queue JOIN mq_groups g ON g.queue = q.id AND g.name = r.grp
      WHERE p.id = r.part;
    CONTINUE WHEN NOT FOUND;
    SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = r.part AND x.grp = v_grp FOR UPDATE;
    CONTINUE WHEN NOT FOUND;
    t := clock();
    v_live := c.lease IS NOT NULL AND EXISTS (SELECT FROM mq_leases l WHERE l.id = c.lease AND l.until > t);
    -- Mostly a batch is completed as a whole: that takes no turn for each of it.
    IF v_live AND cardinality(r.txs) = cardinality(c.open)
        AND NOT EXISTS (SELECT FROM unnest(r.statuses, r.leases) u(status, lease)
            WHERE u.status <> 'completed' OR u.lease <> c.lease) THEN
      SELECT array_agg(x.seq) INTO v_seqs FROM (
        SELECT DISTINCT m.seq
          FROM unnest(r.txs) u(tx)
          JOIN mq_messages m ON m.partition = r.part AND m.transaction_id = u.tx AND m.grp IS NULL ORDER BY m.seq) x;
      IF v_seqs = c.open THEN
        IF cardinality(r.ixs) = cardinality(outcomes) THEN outcomes := array_fill('done'::text,
            ARRAY[cardinality(outcomes)]);
        ELSE FOREACH v_n IN ARRAY r.ixs LOOP outcomes[v_n] := 'done'; END LOOP; END IF;
        v_leases := v_leases || mq_end(r.part, v_grp, v_seqs); v_parts := v_parts || r.part;
        CONTINUE;
      END IF;
    END IF;
    v_buried := '{}'; v_why := '{}'; v_letter := '{}'; v_letter_why := '{}'; v_done := 0;
    FOR a IN
      SELECT u.i, u.lease, u.status, u.error, m.seq
        FROM unnest(r.ixs, r.txs, r.leases, r.statuses, r.errors) u(i, tx, lease, status, error)
        -- Two arms: each has its index.
        LEFT JOIN LATERAL (SELECT x.seq FROM mq_messages x
            WHERE x.partition = r.part AND x.transaction_id = u.tx AND x.grp IS NULL
          UNION ALL SELECT x.seq FROM mq_messages x
            WHERE x.partition = r.part AND x.transaction_id = u.tx AND x.grp IS NOT NULL AND x.grp = v_grp) m ON true
      ORDER BY u.i, m.seq = ANY (c.open)
    LOOP
      CONTINUE WHEN a.seq IS NULL;
      IF NOT v_live OR a.lease IS DISTINCT FROM c.lease AND a.lease IS NOT NULL THEN
        outcomes[a.i] := 'lost';
        CONTINUE;
      END IF;
      -- Answered before, or never delivered.
      IF NOT a.seq = ANY (c.open) THEN
        IF outcomes[a.i] = 'unknown' THEN outcomes[a.i] := CASE
          WHEN a.seq <= c.head OR a.seq = ANY (c.batch) THEN 'lost' ELSE 'unknown' END; END IF;
        CONTINUE;
      END IF;
      c.open := array_remove(c.open, a.seq);
      IF a.status = 'completed' THEN
        outcomes[a.i] := 'done'; c.done := c.done || a.seq; v_done := v_done + 1;
        CONTINUE;
      END IF;
      -- Handed back, not failed: at once again, and not counted.
      IF a.status = 'retry' THEN outcomes[a.i] := 'retry'; CONTINUE; END IF;
      v_n := coalesce((c.tries->>(a.seq::text))::int, 0) + 1;
      c.tries := c.tries || jsonb_build_object(a.seq::text, v_n);
      IF a.status = 'dlq' THEN
        outcomes[a.i] := 'dead'; c.done := c.done || a.seq;
        v_letter := v_letter || a.seq; v_letter_why := v_letter_why || a.error;
      ELSIF v_n > v_limit THEN
        outcomes[a.i] := CASE WHEN v_letters THEN 'dead' ELSE 'skipped' END; c.done := c.done || a.seq;
        v_buried := v_buried || a.seq; v_why := v_why || a.error;
      ELSE
        outcomes[a.i] := 'retry';
        c.not_before := greatest(c.not_before, t + v_delay * interval '1 ms');
      END IF;
    END LOOP;
    IF v_buried <> '{}' THEN PERFORM mq_bury(r.part, v_grp, v_buried, v_why, c.tries, false); END IF;
    IF v_letter <> '{}' THEN PERFORM mq_bury(r.part, v_grp, v_letter, v_letter_why, c.tries, true); END IF;
    CONTINUE WHEN NOT v_live;
    UPDATE mq_cursors x
      SET open = c.open, done = c.done, tries = c.tries, not_before = c.not_before, consumed = x.consumed + v_done,
        moved_at = t WHERE x.partition = r.part AND x.grp = v_grp;
    IF c.open = '{}' THEN v_leases := v_leases || mq_end(r.part, v_grp); v_parts := v_parts || r.part; END IF;
  END LOOP;
  PERFORM mq_unlease(v_leases, v_parts);
  RETURN outcomes;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_before(p_partition uuid, p_at timestamp with time zone)
 RETURNS bigint
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_low bigint; v_high bigint; v_mid bigint; v_seq bigint; v_at timestamptz;
BEGIN
  SELECT p.low, p.tail INTO v_low, v_high FROM mq_partitions p WHERE p.id = p_partition;
  WHILE v_low < v_high LOOP
    v_mid := (v_low + v_high + 1) / 2;
    SELECT m.seq, m.created_at INTO v_seq, v_at FROM mq_messages m
      WHERE m.partition = p_partition AND m.seq >= v_mid AND m.seq <= v_high ORDER BY m.seq LIMIT 1;
    IF FOUND AND v_at < p_at THEN v_low := v_seq; ELSE v_high := v_mid - 1; END IF;
  END LOOP;
  RETURN coalesce(v_low, 0);
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_bury(p_partition uuid, p_grp integer, p_seqs bigint[], p_errors text[], p_tries jsonb, p_letter boolean)
 RETURNS void
 LANGUAGE sql
 SET search_path TO 'spillway'
AS $function$
  INSERT INTO mq_dead (message_id, partition, seq, queue, partition_name, namespace, task, grp, transaction_id,
      trace_id, sealed, payload, error, retry_count, is_letter, created_at, moved_at)
  SELECT m.id, m.partition, m.seq, q.name, p.name, q.namespace, q.task, g.name, m.transaction_id, m.trace_id,
    m.sealed, m.payload, u.error,
    coalesce((p_tries->>(m.seq::text))::int, 0), p_letter OR q.dead_letter_queue
      OR q.dlq_after_max_retries, m.created_at, clock()
  FROM unnest(p_seqs, p_errors) u(seq, error) JOIN mq_messages m ON m.partition = p_partition AND m.seq = u.seq
    JOIN mq_partitions p ON p.id = m.partition JOIN mq_queues q ON q.id = p.queue JOIN mq_groups g ON g.id = p_grp
$function$;

CREATE OR REPLACE FUNCTION spillway.mq_clear(p_queue text, p_partition text)
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_n bigint := 0; v_gone bigint; v_tail bigint; r record; v_leases uuid[] := '{}'; v_parts uuid[] := '{}';
BEGIN
  -- Nobody joins meanwhile.
  PERFORM mq_guard(ARRAY(SELECT q.id FROM mq_queues q WHERE q.name = p_queue), false);
  FOR r IN SELECT p.id FROM mq_partitions p JOIN mq_queues q ON q.id = p.queue
    WHERE q.name = p_queue AND (p_partition IS NULL OR p.name = p_partition) ORDER BY p.id LOOP
    -- A cursor for those who may take from it at this moment, to lock; the others stand at the end, or begin behind it.
    INSERT INTO mq_cursors (partition, grp, head) SELECT r.id, x.grp, 0 FROM mq_ready x WHERE x.partition = r.id
      ORDER BY x.grp ON CONFLICT (partition, grp) DO NOTHING;
    PERFORM FROM mq_cursors c WHERE c.partition = r.id ORDER BY c.grp FOR UPDATE;
    SELECT v_leases || coalesce(array_agg(c.lease), '{}'), v_parts || coalesce(array_agg(r.id), '{}')
      INTO v_leases, v_parts FROM mq_cursors c WHERE c.partition = r.id AND c.lease IS NOT NULL;
    UPDATE mq_partitions p SET low = p.tail, holes = '{}', mark = p.tail WHERE p.id = r.id RETURNING p.tail INTO v_tail;
    DELETE FROM mq_messages m WHERE m.partition = r.id;
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    v_n := v_n + v_gone;
    UPDATE mq_cursors c
      SET head = v_tail, done = '{}', lease = NULL, batch = '{}', open = '{}', tries = '{}', careful = 0,
        not_before = NULL, moved_at = clock() WHERE c.partition = r.id;
    DELETE FROM mq_ready x WHERE x.partition = r.id;
  END LOOP;
  PERFORM mq_unlease(v_leases, v_parts);
  RETURN v_n;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_cut(p_partition uuid, p_upto bigint, p_most integer)
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_low bigint; v_upto bigint; v_n bigint;
BEGIN
  SELECT least(p_upto, p.tail), p.low INTO v_upto, v_low FROM mq_partitions p WHERE p.id = p_partition
    FOR NO KEY UPDATE;
  IF v_upto IS NULL OR v_upto <= v_low THEN RETURN 0; END IF;
  SELECT coalesce(max(x.seq) FILTER (WHERE x.n = p_most), v_upto) INTO v_upto
    FROM (SELECT m.seq, row_number() OVER (ORDER BY m.seq) AS n FROM mq_messages m
        WHERE m.partition = p_partition AND m.seq <= v_upto ORDER BY m.seq LIMIT p_most) x;
  DELETE FROM mq_messages m WHERE m.partition = p_partition AND m.seq <= v_upto;
  GET DIAGNOSTICS v_n = ROW_COUNT;
  UPDATE mq_partitions p
    SET low = v_upto, holes = CASE WHEN p.holes = '{}' THEN p.holes
      ELSE ARRAY(SELECT h FROM unnest(p.holes) h WHERE h > v_upto) END WHERE p.id = p_partition;
  RETURN v_n;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_drop(p_queue text)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_queue int;
BEGIN
  -- By its number from here on: a new queue with this name is another queue.
  SELECT q.id INTO v_queue FROM mq_queues q WHERE q.name = p_queue;
  IF NOT mq_guard(ARRAY[v_queue], true) THEN RETURN false; END IF;
  DELETE FROM mq_messages m USING mq_partitions p WHERE p.queue = v_queue AND m.partition = p.id;
  DELETE FROM mq_traces x USING mq_partitions p WHERE p.queue = v_queue AND x.partition = p.id;
  DELETE FROM mq_cursors x USING mq_partitions p WHERE p.queue = v_queue AND x.partition = p.id;
  DELETE FROM mq_ready x USING mq_partitions p WHERE p.queue = v_queue AND x.partition = p.id;
  DELETE FROM mq_leases l USING mq_groups g WHERE g.queue = v_queue AND l.grp = g.id;
  DELETE FROM mq_queues q WHERE q.id = v_queue;
  RETURN FOUND;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_due(p_queues text[], p_groups text[])
 RETURNS TABLE(queue text, grp text)
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
BEGIN
  IF EXISTS (SELECT FROM mq_leases l WHERE l.until <= clock()) THEN PERFORM mq_expire(NULL, 1000); END IF;
  RETURN QUERY SELECT u.queue, u.grp
    FROM unnest(p_queues, p_groups) u(queue, grp) JOIN mq_queues q ON q.name = u.queue
    LEFT JOIN mq_groups g ON g.queue = q.id AND g.name = u.grp
    WHERE g.id IS NULL OR g.reached IS NOT NULL OR EXISTS (SELECT FROM mq_ready r
        WHERE r.grp = g.id AND r.at <= clock());
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_duplicates(p_verdicts text[], p_partitions uuid[], p_item integer[], p_ids uuid[], p_transactions text[], p_failed text[], p_parts uuid[], p_tails bigint[], p_counts bigint[])
 RETURNS uuid[]
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
DECLARE
  v_dup uuid[] := array_fill(NULL::uuid, ARRAY[cardinality(p_item)]);
  r record;
BEGIN
  DELETE FROM mq_messages m USING unnest(p_parts, p_tails, p_counts) p(id, tail, n)
    WHERE m.partition = p.id AND m.seq > p.tail - p.n;
  FOR r IN
    SELECT u.k, coalesce(m.id, first_value(u.id) OVER w) AS there, m.id IS NOT NULL OR row_number() OVER w > 1 AS dup
    FROM unnest(p_item, p_ids, p_transactions, p_failed) WITH ORDINALITY u(item, id, tx, failed, k)
      LEFT JOIN mq_messages m ON m.partition = p_partitions[u.item] AND m.transaction_id = u.tx AND m.grp IS NULL
    WHERE p_verdicts[u.item] = 'apply' AND u.failed IS NULL
    WINDOW w AS (PARTITION BY p_partitions[u.item], u.tx ORDER BY u.k)
  LOOP
    IF r.dup THEN v_dup[r.k] := r.there; END IF;
  END LOOP;
  RETURN v_dup;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_end(p_partition uuid, p_grp integer, p_done bigint[] DEFAULT '{}'::bigint[])
 RETURNS uuid
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  c mq_cursors; v_head bigint; v_done bigint[];
BEGIN
  SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = p_partition AND x.grp = p_grp;
  v_done := c.done || p_done;
  -- Mostly all of it is settled at once.
  IF cardinality(p_done) < cardinality(c.batch) THEN
    SELECT min(x.seq) - 1 INTO v_head FROM (SELECT unnest(c.batch) EXCEPT SELECT unnest(v_done)) x(seq);
  END IF;
  v_head := greatest(c.head, coalesce(v_head, (SELECT max(x.seq) FROM unnest(c.batch) x(seq))));
  UPDATE mq_cursors x SET lease = NULL, batch = '{}', open = '{}', head = v_head,
      done = CASE WHEN c.done = '{}' AND cardinality(p_done) = cardinality(c.batch) THEN '{}'
        ELSE ARRAY(SELECT d FROM unnest(v_done) d WHERE d > v_head) END,
      tries = CASE WHEN c.tries = '{}' THEN c.tries
        ELSE coalesce((SELECT jsonb_object_agg(e.key, e.value) FROM jsonb_each(c.tries) e
              WHERE e.key::bigint > v_head), '{}') END,
      not_before = NULL, consumed = x.consumed + cardinality(p_done), moved_at = CASE
        WHEN p_done = '{}' THEN x.moved_at ELSE clock() END
    WHERE x.partition = p_partition AND x.grp = p_grp;
  PERFORM mq_requeue(p_partition, p_grp, v_head, c.not_before);
  RETURN c.lease;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_expire(p_grp integer, p_most integer)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  r record; c mq_cursors; v_limit int; v_tries jsonb; v_leases uuid[] := '{}'; v_parts uuid[] := '{}';
BEGIN
  FOR r IN
    SELECT l.id, l.grp, u.partition
      FROM (SELECT x.* FROM mq_leases x WHERE x.until <= t AND (p_grp IS NULL OR x.grp = p_grp) ORDER BY x.until
          LIMIT p_most) l, unnest(l.partitions) u(partition)
    ORDER BY u.partition, l.grp
  LOOP
    SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = r.partition AND x.grp = r.grp AND x.lease = r.id
      FOR UPDATE SKIP LOCKED;
    CONTINUE WHEN NOT FOUND OR NOT EXISTS (SELECT FROM mq_leases l WHERE l.id = r.id AND l.until <= t);
    v_tries := c.tries
      || coalesce((SELECT jsonb_object_agg(o::text, coalesce((c.tries->>(o::text))::int, 0) + 1)
            FROM unnest(c.open) o), '{}');
    SELECT q.retry_limit INTO v_limit FROM mq_partitions p JOIN mq_queues q ON q.id = p.queue WHERE p.id = r.partition;
    IF cardinality(c.batch) = 1 AND cardinality(c.open) = 1 AND (v_tries->>(c.open[1]::text))::int > v_limit THEN
      PERFORM mq_bury(r.partition, r.grp, c.open, ARRAY['The lease expired ' || (v_limit + 1) || ' times.'], v_tries,
          false);
      c.done := c.done || c.open;
    END IF;
    UPDATE mq_cursors x
      SET tries = v_tries, done = c.done, careful = CASE
        WHEN cardinality(c.batch) > 1 THEN (SELECT max(b) FROM unnest(c.batch) b) ELSE x.careful END
      WHERE x.partition = r.partition AND x.grp = r.grp;
    v_leases := v_leases || mq_end(r.partition, r.grp); v_parts := v_parts || r.partition;
  END LOOP;
  PERFORM mq_unlease(v_leases, v_parts);
  -- Of a queue or group that is gone: no cursor names it any more.
  DELETE FROM mq_leases l
    WHERE l.until <= t AND (p_grp IS NULL OR l.grp = p_grp) AND NOT EXISTS (SELECT FROM mq_cursors c
        WHERE c.lease = l.id AND c.partition = ANY (l.partitions) AND c.grp = l.grp);
  RETURN cardinality(v_parts);
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_extend(p_lease uuid, p_seconds integer)
 RETURNS timestamp with time zone
 LANGUAGE sql
 SET search_path TO 'spillway'
AS $function$
  UPDATE mq_leases l
    SET until = greatest(l.until,
        clock() + coalesce(p_seconds, (SELECT q.lease_seconds FROM mq_groups g JOIN mq_queues q ON q.id = g.queue
              WHERE g.id = l.grp)) * interval '1 second')
  WHERE l.id = p_lease AND l.until > clock() RETURNING l.until
$function$;

CREATE OR REPLACE FUNCTION spillway.mq_give_up(p_partition uuid, p_grp integer, p_upto bigint, p_most integer)
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  c mq_cursors; v_head bigint; v_seqs bigint[];
BEGIN
  SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = p_partition AND x.grp = p_grp;
  v_seqs := ARRAY(SELECT m.seq FROM mq_messages m
      WHERE m.partition = p_partition AND m.seq > c.head AND m.seq <= p_upto AND NOT m.seq = ANY (c.done)
        AND (m.grp IS NULL OR m.grp = p_grp) ORDER BY m.seq LIMIT p_most);
  -- Not all of it: the next call takes the rest.
  v_head := CASE WHEN cardinality(v_seqs) = p_most THEN v_seqs[p_most] ELSE greatest(c.head, p_upto) END;
  PERFORM mq_bury(p_partition, p_grp, v_seqs,
      array_fill('It waited longer than maxWaitTimeSeconds.'::text, ARRAY[cardinality(v_seqs)]), c.tries, false);
  UPDATE mq_cursors x SET head = v_head, done = ARRAY(SELECT d FROM unnest(x.done) d WHERE d > v_head)
    WHERE x.partition = p_partition AND x.grp = p_grp;
  RETURN cardinality(v_seqs);
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_guard(p_queues integer[], p_exclusive boolean)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
DECLARE
  v_queue int; v_there boolean := true;
BEGIN
  FOR v_queue IN SELECT DISTINCT q FROM unnest(p_queues) q ORDER BY q LOOP
    IF p_exclusive THEN PERFORM pg_advisory_xact_lock(hashtext('spillway.groups.' || current_schema()), v_queue);
    ELSE PERFORM pg_advisory_xact_lock_shared(hashtext('spillway.groups.' || current_schema()), v_queue); END IF;
    v_there := v_there AND EXISTS (SELECT FROM mq_queues q WHERE q.id = v_queue);
  END LOOP;
  RETURN v_there;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_head(p_cursor bigint, p_ready bigint, p_reached uuid, p_partition uuid, p_low bigint, p_tail bigint)
 RETURNS bigint
 LANGUAGE sql
 IMMUTABLE PARALLEL SAFE
RETURN COALESCE(p_cursor, p_ready, CASE WHEN (p_partition > p_reached) THEN p_low ELSE p_tail END);

CREATE OR REPLACE FUNCTION spillway.mq_holes(p_holes bigint[], p_behind bigint, p_done bigint[])
 RETURNS bigint
 LANGUAGE sql
 IMMUTABLE
AS $function$
  SELECT CASE WHEN p_holes = '{}' THEN 0
    ELSE (SELECT count(*) FROM unnest(p_holes) h WHERE h > p_behind AND NOT h = ANY (p_done)) END
$function$;

CREATE OR REPLACE FUNCTION spillway.mq_insert(p_verdicts text[], p_partitions uuid[], p_item integer[], p_ids uuid[], p_transactions text[], p_traces text[], p_sealed boolean[], p_payloads text[], p_failed text[], p_dup uuid[], p_parts uuid[], p_tails bigint[], p_counts bigint[], p_at timestamp with time zone)
 RETURNS bigint
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
DECLARE
  v_inserted bigint;
BEGIN
  INSERT INTO mq_messages (partition, seq, id, transaction_id, trace_id, sealed, payload, created_at)
    SELECT m.part, p.tail - p.n + m.rn, m.id, m.tx, m.trace, m.sealed, m.payload, p_at
    FROM (
      SELECT p_partitions[u.item] AS part, u.id, u.tx, u.trace, u.sealed, u.payload,
        row_number() OVER (PARTITION BY p_partitions[u.item] ORDER BY u.k) AS rn
      FROM unnest(p_item, p_ids, p_transactions, p_traces, p_sealed, p_payloads, p_failed, p_dup) WITH ORDINALITY
        u(item, id, tx, trace, sealed, payload, failed, dup, k)
      WHERE p_verdicts[u.item] = 'apply' AND u.failed IS NULL AND u.dup IS NULL
    ) m JOIN unnest(p_parts, p_tails, p_counts) p(id, tail, n) ON p.id = m.part
    ON CONFLICT (partition, transaction_id) WHERE grp IS NULL DO NOTHING;
  GET DIAGNOSTICS v_inserted = ROW_COUNT;
  RETURN v_inserted;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_joined(p_queue integer, p_partition text, p_grp integer, p_reached uuid)
 RETURNS boolean
 LANGUAGE sql
 STABLE
AS $function$
  SELECT EXISTS (SELECT FROM mq_partitions p LEFT JOIN mq_cursors x ON x.partition = p.id AND x.grp = p_grp
    WHERE p.queue = p_queue AND p.name = p_partition AND (p.id <= p_reached OR x.head IS NOT NULL))
$function$;

CREATE OR REPLACE FUNCTION spillway.mq_number(p_verdicts text[], p_partitions uuid[], p_queue integer[], p_names text[], p_item integer[], p_failed text[], p_at timestamp with time zone, OUT parts uuid[], OUT tails bigint[], OUT counts bigint[], OUT owners integer[], OUT expected bigint)
 RETURNS record
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
BEGIN
  WITH n AS (
    SELECT p_partitions[u.item] AS part, min(u.item) AS item, count(*) AS n
    FROM unnest(p_item, p_failed) u(item, failed)
    WHERE p_verdicts[u.item] = 'apply' AND u.failed IS NULL GROUP BY 1 ORDER BY 1
  ), up AS (
    INSERT INTO mq_partitions AS p (id, queue, name, tail, pushed_at, created_at)
    SELECT n.part, p_queue[n.item], p_names[n.item], n.n, p_at, p_at FROM n
    ON CONFLICT (id) DO UPDATE SET tail = p.tail + excluded.tail, pushed_at = p_at
    RETURNING p.id, p.tail, p.queue
  )
  SELECT array_agg(up.id), array_agg(up.tail), array_agg(n.n), array_agg(up.queue), coalesce(sum(n.n), 0)
    INTO parts, tails, counts, owners, expected FROM up JOIN n ON n.part = up.id;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_pop(p_queue text, p_namespace text, p_task text, p_partition text, p_group text, p_batch integer, p_partitions integer, p_auto boolean, p_lease uuid, p_mode text, p_from timestamp with time zone, p_bytes integer, p_flush integer, OUT queue text, OUT namespace text, OUT task text, OUT parts uuid[], OUT names text[], OUT ix integer[], OUT ids uuid[], OUT transactions text[], OUT traces text[], OUT sealed boolean[], OUT payloads text, OUT created_ms bigint[], OUT tries integer[], OUT due_ms bigint, OUT leased boolean, OUT more boolean, OUT missing integer[])
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
 SET plan_cache_mode TO 'force_generic_plan'
 SET jit TO 'off'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  q mq_queues; c mq_cursors; m record; v_grp int; v_reached uuid; v_due timestamptz;
  v_part uuid; v_name text; v_pushed timestamptz; v_head bigint; v_at timestamptz;
  v_left int; v_bytes bigint := 0; v_most int := 1000;
  v_flushed bigint := nullif(current_setting('spillway.popped_bytes', true), '');
BEGIN
  ix := '{}'; payloads := ''; more := v_flushed >= p_flush;
  IF more THEN RETURN; END IF;
  more := false;
  IF p_queue IS NOT NULL AND p_mode <> 'all' THEN PERFORM mq_queue(p_queue); END IF;
  FOR q IN SELECT x.* FROM mq_queues x WHERE CASE WHEN p_queue IS NOT NULL THEN x.name = p_queue
      ELSE (p_namespace IS NULL OR x.namespace = p_namespace) AND (p_task IS NULL OR x.task = p_task) END
      ORDER BY x.priority DESC, x.name LOOP
    SELECT g.id, g.reached INTO v_grp, v_reached FROM mq_groups g WHERE g.queue = q.id AND g.name = p_group;
    IF NOT FOUND THEN missing := missing || q.id; END IF;
    -- Not past a queue of higher priority whose content is not known yet.
    CONTINUE WHEN missing IS NOT NULL;
    IF EXISTS (SELECT FROM mq_leases l WHERE l.grp = v_grp AND l.until <= t) THEN
      PERFORM mq_expire(v_grp, 100);
      t := clock();
    END IF;
    v_left := p_batch; parts := '{}'; names := '{}'; leased := false;
    LOOP
      EXIT WHEN v_left <= 0 OR cardinality(parts) >= p_partitions OR v_bytes >= p_bytes
        OR p_partition IS NOT NULL AND cardinality(parts) > 0;
      IF p_partition IS NULL THEN
        DELETE FROM mq_ready r WHERE r.ctid = (
            SELECT x.ctid FROM mq_ready x WHERE x.grp = v_grp AND x.at <= t ORDER BY x.at LIMIT 1
            FOR UPDATE SKIP LOCKED)
          RETURNING r.partition, r.at, r.head INTO v_part, v_at, v_head;
      ELSE
        DELETE FROM mq_ready r WHERE r.ctid = (
            SELECT x.ctid FROM mq_partitions p JOIN mq_ready x ON x.partition = p.id AND x.grp = v_grp AND x.at <= t
            WHERE p.queue = q.id AND p.name = p_partition FOR UPDATE OF x SKIP LOCKED)
          RETURNING r.partition, r.at, r.head INTO v_part, v_at, v_head;
      END IF;
      EXIT WHEN v_part IS NULL;
      SELECT p.name, p.pushed_at INTO v_name, v_pushed FROM mq_partitions p WHERE p.id = v_part;
      SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = v_part AND x.grp = v_grp FOR UPDATE;
      IF NOT FOUND THEN
        INSERT INTO mq_cursors (partition, grp, head) VALUES (v_part, v_grp, coalesce(v_head, 0))
          ON CONFLICT (partition, grp) DO NOTHING;
        SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = v_part AND x.grp = v_grp FOR UPDATE;
      END IF;
      -- The end of its lease says when there is more.
      CONTINUE WHEN c.lease IS NOT NULL;
      IF q.window_seconds > 0 AND v_pushed + q.window_seconds * interval '1 second' > t THEN
        INSERT INTO mq_ready (partition, grp, at)
          VALUES (v_part, v_grp, v_pushed + q.window_seconds * interval '1 second');
        CONTINUE;
      END IF;
      -- Nothing is delivered that waited too long, whether or not a sweep came by.
      IF q.max_wait_seconds > 0 THEN
        v_most := v_most - mq_pop_give_up(c, q.max_wait_seconds, v_most, t);
        more := v_most <= 0;
        EXIT WHEN more;
        SELECT x.* INTO c FROM mq_cursors x WHERE x.partition = v_part AND x.grp = v_grp;
      END IF;
      -- What is due is a beginning of what is there, and so is what the answer has room for. The first one always fits.
      SELECT array_agg(x.seq) AS seqs, array_agg(x.id) AS ids, array_agg(x.transaction_id) AS txs,
          array_agg(x.trace_id) AS traces, array_agg(x.sealed) AS sealed,
          string_agg(x.payload, E'\x1e' ORDER BY x.seq) AS payloads,
          array_agg((extract(epoch FROM x.created_at) * 1000)::bigint) AS created,
          array_agg(coalesce((c.tries->>(x.seq::text))::int, 0)) AS tries, max(x.bytes) AS bytes
        INTO m FROM (
          SELECT y.*, sum(octet_length(y.payload)) OVER (ORDER BY y.seq) AS bytes,
            row_number() OVER (ORDER BY y.seq) AS n
          FROM (
            SELECT z.seq, z.id, z.transaction_id, z.trace_id, z.sealed, z.payload, z.created_at FROM mq_messages z
            WHERE z.partition = v_part AND z.seq > c.head AND (c.done = '{}' OR NOT z.seq = ANY (c.done))
              AND (z.grp IS NULL OR z.grp = v_grp)
            ORDER BY z.seq LIMIT CASE WHEN c.careful > c.head THEN 1 ELSE v_left END
          ) y WHERE q.delay_seconds = 0 OR y.created_at <= t - q.delay_seconds * interval '1 second'
        ) x WHERE x.bytes <= p_bytes - v_bytes OR x.n = 1 AND v_bytes = 0;
      IF m.seqs IS NULL THEN
        EXIT WHEN mq_pop_nothing(c, q.delay_seconds, v_at, v_bytes > 0, t);
        CONTINUE;
      END IF;
      -- A sealed message is settled by the caller once it could be read.
      IF p_auto AND NOT true = ANY (m.sealed) THEN
        c.head := m.seqs[cardinality(m.seqs)];
        UPDATE mq_cursors x SET head = c.head, done = ARRAY(SELECT d FROM unnest(c.done) d WHERE d > c.head),
            tries = '{}', consumed = x.consumed + cardinality(m.seqs), moved_at = t
          WHERE x.partition = v_part AND x.grp = v_grp;
        PERFORM mq_requeue(v_part, v_grp, c.head, NULL);
      ELSE
        leased := true;
        UPDATE mq_cursors x SET lease = p_lease, batch = m.seqs, open = m.seqs
          WHERE x.partition = v_part AND x.grp = v_grp;
      END IF;
      parts := parts || v_part; names := names || v_name;
      ix := ix || array_fill(cardinality(parts), ARRAY[cardinality(m.seqs)]);
      ids := ids || m.ids; transactions := transactions || m.txs; traces := traces || m.traces;
      sealed := sealed || m.sealed; created_ms := created_ms || m.created; tries := tries || m.tries;
      payloads := CASE WHEN payloads = '' THEN m.payloads ELSE payloads || E'\x1e' || m.payloads END;
      v_left := v_left - cardinality(m.seqs); v_bytes := v_bytes + m.bytes;
    END LOOP;
    -- Others wait behind what the group has joined so far, so it goes on joining whatever it found.
    IF v_reached IS NOT NULL AND (p_partition IS NULL
        OR cardinality(parts) = 0 AND NOT mq_joined(q.id, p_partition, v_grp, v_reached)) THEN
      missing := ARRAY[q.id];
    END IF;
    IF cardinality(parts) > 0 THEN
      queue := q.name; namespace := q.namespace; task := q.task;
      -- Small ones are bounded by their number.
      IF v_bytes > 65536 THEN
        PERFORM set_config('spillway.popped_bytes', (coalesce(v_flushed, 0) + v_bytes)::text, true);
      END IF;
      IF leased THEN
        INSERT INTO mq_leases (id, grp, until, partitions)
          VALUES (p_lease, v_grp, t + q.lease_seconds * interval '1 second', ARRAY(SELECT x.partition FROM mq_cursors x
            WHERE x.partition = ANY (parts) AND x.grp = v_grp AND x.lease = p_lease));
      END IF;
      RETURN;
    END IF;
    EXIT WHEN more;
    v_due := least(v_due, (SELECT x.at FROM mq_ready x WHERE x.grp = v_grp ORDER BY x.at LIMIT 1),
      (SELECT l.until FROM mq_leases l WHERE l.grp = v_grp ORDER BY l.until LIMIT 1));
  END LOOP;
  due_ms := ceil(extract(epoch FROM v_due - clock()) * 1000);
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_pop_give_up(c mq_cursors, p_max_wait_seconds integer, p_most integer, t timestamp with time zone)
 RETURNS integer
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
DECLARE
  v_old timestamptz := t - p_max_wait_seconds * interval '1 second'; v_n int;
BEGIN
  IF (v_old > (SELECT z.created_at FROM mq_messages z
      WHERE z.partition = c.partition AND z.seq > c.head ORDER BY z.seq LIMIT 1)) IS NOT TRUE THEN
    RETURN 0;
  END IF;
  v_n := mq_give_up(c.partition, c.grp, mq_before(c.partition, v_old), p_most);
  IF v_n >= p_most THEN INSERT INTO mq_ready (partition, grp, at) VALUES (c.partition, c.grp, t); END IF;
  RETURN v_n;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_pop_nothing(c mq_cursors, p_delay_seconds integer, p_at timestamp with time zone, p_bounded boolean, t timestamp with time zone)
 RETURNS boolean
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
DECLARE
  v_first timestamptz; v_tail bigint;
BEGIN
  IF p_bounded AND (SELECT p_delay_seconds = 0 OR z.created_at <= t - p_delay_seconds * interval '1 second'
      FROM mq_messages z WHERE z.partition = c.partition AND z.seq > c.head AND NOT z.seq = ANY (c.done)
        AND (z.grp IS NULL OR z.grp = c.grp) ORDER BY z.seq LIMIT 1) THEN
    INSERT INTO mq_ready (partition, grp, at) VALUES (c.partition, c.grp, p_at);
    RETURN true;
  END IF;
  -- The lock keeps the tail where it is. What is gone is not waited for.
  SELECT p.tail INTO v_tail FROM mq_partitions p WHERE p.id = c.partition FOR SHARE;
  SELECT z.created_at INTO v_first FROM mq_messages z
    WHERE z.partition = c.partition AND z.seq > c.head AND NOT z.seq = ANY (c.done) AND (z.grp IS NULL OR z.grp = c.grp)
    ORDER BY z.seq LIMIT 1;
  IF FOUND THEN
    INSERT INTO mq_ready (partition, grp, at)
      VALUES (c.partition, c.grp, greatest(t, v_first + p_delay_seconds * interval '1 second') + interval '1 ms');
  ELSE
    UPDATE mq_cursors x SET head = greatest(x.head, v_tail), done = '{}', tries = '{}'
      WHERE x.partition = c.partition AND x.grp = c.grp;
  END IF;
  RETURN false;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_push_check(p_verdicts text[], p_queue integer[], p_partitions uuid[], p_item integer[], p_transactions text[], p_sealed boolean[])
 RETURNS text[]
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
DECLARE
  v_failed text[] := array_fill(NULL::text, ARRAY[cardinality(p_item)]);
  v_first bigint[]; v_left bigint; v_most bigint; v_asked bigint; r record;
BEGIN
  -- A message that exists already, or comes twice, takes no room: 0, or the number of the first.
  SELECT array_agg(CASE WHEN x.there THEN 0 ELSE x.first END ORDER BY x.k) INTO v_first FROM (
    SELECT u.k,
      first_value(u.k) OVER (
        PARTITION BY p_verdicts[u.item] = 'apply', p_partitions[u.item], u.tx ORDER BY u.k) AS first,
      EXISTS (SELECT FROM mq_messages m
        WHERE m.partition = p_partitions[u.item] AND m.transaction_id = u.tx AND m.grp IS NULL) AS there
    FROM unnest(p_item, p_transactions) WITH ORDINALITY u(item, tx, k)
  ) x;
  FOR r IN SELECT q.id, q.max_size, q.encryption_enabled FROM mq_queues q
      WHERE q.id = ANY (p_queue) AND (q.max_size > 0 OR q.encryption_enabled) ORDER BY q.id LOOP
    IF r.max_size > 0 THEN
      -- One at a time; in the order of the queues, behind the lanes. What is consumed makes room, so it is counted only
      -- if the last count and what came since leave none.
      SELECT q.size_most INTO v_most FROM mq_queues q WHERE q.id = r.id FOR NO KEY UPDATE;
      SELECT count(*) INTO v_asked FROM unnest(p_item, v_first) WITH ORDINALITY u(item, first, k)
        WHERE p_queue[u.item] = r.id AND u.first = u.k;
      IF v_most IS NULL OR v_most + v_asked > r.max_size THEN v_most := mq_size(r.id); END IF;
      v_left := r.max_size - v_most;
    END IF;
    FOR i IN 1 .. cardinality(p_item) LOOP
      CONTINUE WHEN p_queue[p_item[i]] <> r.id OR p_verdicts[p_item[i]] <> 'apply';
      IF r.encryption_enabled AND NOT p_sealed[i] THEN
        v_failed[i] := 'encryption_required';
      ELSIF r.max_size > 0 THEN
        CONTINUE WHEN v_first[i] = 0;
        IF v_first[i] < i THEN v_failed[i] := v_failed[v_first[i]];
        ELSIF v_left <= 0 THEN v_failed[i] := 'queue_full';
        ELSE v_left := v_left - 1; END IF;
      END IF;
    END LOOP;
    IF r.max_size > 0 THEN UPDATE mq_queues q SET size_most = r.max_size - v_left WHERE q.id = r.id; END IF;
  END LOOP;
  RETURN v_failed;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_push_ready(p_parts uuid[], p_tails bigint[], p_counts bigint[], p_owners integer[], p_at timestamp with time zone)
 RETURNS boolean
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
BEGIN
  INSERT INTO mq_ready (partition, grp, at, head)
    SELECT p.id, g.id, p_at + greatest(q.delay_seconds, q.window_seconds) * interval '1 second',
      CASE WHEN c.head IS NULL THEN p.tail - p.n END
    FROM unnest(p_parts, p_tails, p_counts, p_owners) p(id, tail, n, queue)
      JOIN mq_queues q ON q.id = p.queue JOIN mq_groups g ON g.queue = p.queue
      LEFT JOIN mq_cursors c ON c.partition = p.id AND c.grp = g.id
    WHERE p.n > 0 AND c.lease IS NULL AND CASE WHEN c.head IS NOT NULL THEN c.head >= p.tail - p.n
      ELSE p.id > g.reached IS NOT TRUE
        AND (SELECT x.grp FROM mq_ready x WHERE x.partition = p.id AND x.grp = g.id) IS NULL END
    ON CONFLICT (partition, grp) DO NOTHING;
  RETURN FOUND;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_push_results(p_verdicts text[], p_item integer[], p_ids uuid[], p_failed text[], p_dup uuid[])
 RETURNS json[]
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
BEGIN
  RETURN (SELECT array_agg(CASE WHEN p_verdicts[i.i] = 'apply' THEN x.result END ORDER BY i.i)
    FROM generate_series(1, cardinality(p_verdicts)) i(i) LEFT JOIN (
      SELECT m.item, json_build_object('ids', json_agg(coalesce(m.dup, m.id) ORDER BY m.k),
        'duplicates', json_object_agg(m.n, m.dup) FILTER (WHERE m.dup IS NOT NULL),
        'failed', json_object_agg(m.n, m.failed) FILTER (WHERE m.failed IS NOT NULL)) AS result
      FROM (
        SELECT u.item, u.id, u.failed, u.dup, u.k, row_number() OVER (PARTITION BY u.item ORDER BY u.k) - 1 AS n
        FROM unnest(p_item, p_ids, p_failed, p_dup) WITH ORDINALITY u(item, id, failed, dup, k)
      ) m GROUP BY m.item
    ) x ON x.item = i.i);
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_pushed(p_verdicts text[], p_seqs bigint[], p_partitions uuid[], p_queues text[], p_names text[], p_item integer[], p_ids uuid[], p_transactions text[], p_traces text[], p_sealed boolean[], p_payloads text, p_queued boolean)
 RETURNS json[]
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
 SET plan_cache_mode TO 'force_generic_plan'
 SET jit TO 'off'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_payloads text[] := string_to_array(p_payloads, E'\x1e');
  v_queue int[]; v_strict boolean; v_new boolean; v_failed text[]; v_dup uuid[]; v_inserted bigint;
  n record;
BEGIN
  IF NOT 'apply' = ANY (p_verdicts) THEN RETURN array_fill(NULL::json, ARRAY[cardinality(p_verdicts)]); END IF;
  -- Until all are guarded: a queue that is deleted while this waits is created again.
  LOOP
    SELECT array_agg(coalesce(q.id, mq_queue(u.name)) ORDER BY u.i),
        coalesce(bool_or(q.max_size > 0 OR q.encryption_enabled), false), bool_or(q.id IS NULL)
      INTO v_queue, v_strict, v_new
      FROM unnest(p_queues) WITH ORDINALITY u(name, i) LEFT JOIN mq_queues q ON q.name = u.name;
    EXIT WHEN mq_guard(v_queue, false);
  END LOOP;
  IF v_strict THEN
    v_failed := mq_push_check(p_verdicts, v_queue, p_partitions, p_item, p_transactions, p_sealed);
    -- A queued push has no caller to answer: the operation fails, and is retried or becomes a dead letter.
    IF p_queued AND (SELECT bool_or(f IS NOT NULL) FROM unnest(v_failed) f) THEN
      RAISE EXCEPTION '%', (SELECT f FROM unnest(v_failed) f WHERE f IS NOT NULL LIMIT 1) USING ERRCODE = 'SP001';
    END IF;
  END IF;
  n := mq_number(p_verdicts, p_partitions, v_queue, p_names, p_item, v_failed, t);
  -- A time under the lock: times are in the order of the numbers. In whole milliseconds, as it is reported: a reader
  -- who asks for what came from such a time on gets it.
  t := date_trunc('milliseconds', clock());
  v_inserted := mq_insert(p_verdicts, p_partitions, p_item, p_ids, p_transactions, p_traces, p_sealed, v_payloads,
    v_failed, v_dup, n.parts, n.tails, n.counts, t);
  -- Some exist already: once more, without them, so that the numbers have no gaps.
  IF v_inserted < n.expected THEN
    v_dup := mq_duplicates(p_verdicts, p_partitions, p_item, p_ids, p_transactions, v_failed, n.parts, n.tails,
      n.counts);
    n := mq_renumber(p_verdicts, p_partitions, p_item, v_failed, v_dup, n.parts, n.counts);
    v_inserted := mq_insert(p_verdicts, p_partitions, p_item, p_ids, p_transactions, p_traces, p_sealed, v_payloads,
      v_failed, v_dup, n.parts, n.tails, n.counts, t);
    IF v_inserted < n.expected THEN
      RAISE EXCEPTION 'stored % messages where % were expected', v_inserted, n.expected USING ERRCODE = 'XX000';
    END IF;
  END IF;
  -- Other processes are notified with the commit. While all groups have something to read, nobody waits.
  IF mq_push_ready(n.parts, n.tails, n.counts, n.owners, t) OR v_new THEN
    PERFORM mq_tell(ARRAY(SELECT DISTINCT q.name FROM mq_queues q WHERE q.id = ANY (n.owners)));
  END IF;
  RETURN mq_push_results(p_verdicts, p_item, p_ids, v_failed, v_dup);
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_queue(p_name text)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_id int;
BEGIN
  -- Another may make it, or delete it, between the two.
  LOOP
    SELECT q.id INTO v_id FROM mq_queues q WHERE q.name = p_name;
    IF FOUND THEN RETURN v_id; END IF;
    INSERT INTO mq_queues (name, created_at) VALUES (p_name, clock()) ON CONFLICT (name) DO NOTHING RETURNING id
      INTO v_id;
    IF FOUND THEN RETURN v_id; END IF;
  END LOOP;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_remove(p_partition uuid, p_transaction text)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_seqs bigint[]; v_low bigint; c record; v_leases uuid[] := '{}'; v_parts uuid[] := '{}';
BEGIN
  -- In the order in which everybody locks: nobody delivers it meanwhile, and nobody pushes.
  PERFORM FROM mq_cursors x WHERE x.partition = p_partition ORDER BY x.grp FOR UPDATE;
  PERFORM FROM mq_partitions p WHERE p.id = p_partition FOR NO KEY UPDATE;
  WITH gone AS (DELETE FROM mq_messages m
      WHERE m.partition = p_partition AND m.transaction_id = p_transaction AND m.grp IS NULL RETURNING m.seq),
    gone_too AS (DELETE FROM mq_messages m
        WHERE m.partition = p_partition AND m.transaction_id = p_transaction AND m.grp IS NOT NULL RETURNING m.seq)
  SELECT array_agg(x.seq) INTO v_seqs FROM (SELECT seq FROM gone UNION ALL SELECT seq FROM gone_too) x;
  IF v_seqs IS NULL THEN RETURN false; END IF;
  SELECT coalesce((SELECT m.seq - 1 FROM mq_messages m WHERE m.partition = p_partition AND m.seq > p.low
        ORDER BY m.seq LIMIT 1), p.tail) INTO v_low FROM mq_partitions p WHERE p.id = p_partition;
  UPDATE mq_partitions p SET low = v_low, holes = ARRAY(SELECT h FROM unnest(p.holes || v_seqs) h WHERE h > v_low)
    WHERE p.id = p_partition;
  FOR c IN SELECT x.grp, x.open FROM mq_cursors x WHERE x.partition = p_partition AND x.open && v_seqs
    ORDER BY x.grp LOOP
    UPDATE mq_cursors x
      SET open = ARRAY(SELECT o FROM unnest(x.open) o WHERE NOT o = ANY (v_seqs)), done = x.done || ARRAY(SELECT o
          FROM unnest(x.open) o WHERE o = ANY (v_seqs))
      WHERE x.partition = p_partition AND x.grp = c.grp;
    IF c.open <@ v_seqs THEN
      v_leases := v_leases || mq_end(p_partition, c.grp);
      v_parts := v_parts || p_partition;
    END IF;
  END LOOP;
  PERFORM mq_unlease(v_leases, v_parts);
  RETURN true;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_renumber(p_verdicts text[], p_partitions uuid[], p_item integer[], p_failed text[], p_dup uuid[], p_parts uuid[], p_counts bigint[], OUT parts uuid[], OUT tails bigint[], OUT counts bigint[], OUT owners integer[], OUT expected bigint)
 RETURNS record
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
BEGIN
  WITH n AS (
    SELECT p_partitions[u.item] AS part, count(*) FILTER (WHERE u.dup IS NULL) AS n
    FROM unnest(p_item, p_failed, p_dup) u(item, failed, dup)
    WHERE p_verdicts[u.item] = 'apply' AND u.failed IS NULL GROUP BY 1
  ), up AS (
    UPDATE mq_partitions p SET tail = p.tail - x.n + n.n
    FROM n JOIN unnest(p_parts, p_counts) x(id, n) ON x.id = n.part WHERE p.id = n.part
    RETURNING p.id, p.tail, n.n, p.queue
  )
  SELECT array_agg(up.id), array_agg(up.tail), array_agg(up.n), array_agg(up.queue), coalesce(sum(up.n), 0)
    INTO parts, tails, counts, owners, expected FROM up;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_replay(p_id uuid)
 RETURNS TABLE(queue text, partition uuid, message_id uuid, transaction_id text)
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  d mq_dead; v_grp int; v_tail bigint; v_queue int;
BEGIN
  SELECT x.* INTO d FROM mq_dead x WHERE x.id = p_id FOR UPDATE;
  IF NOT FOUND THEN RETURN; END IF;
  -- Until both are guarded: what is deleted while this waits is created again.
  LOOP
    v_queue := mq_queue(d.queue);
    PERFORM mq_guard(ARRAY[v_queue], false);
    SELECT g.id INTO v_grp FROM mq_groups g WHERE g.queue = v_queue AND g.name = d.grp;
    IF NOT FOUND THEN v_grp := mq_subscribe(v_queue, d.grp, 'all', NULL); END IF;
    EXIT WHEN v_grp IS NOT NULL;
  END LOOP;
  INSERT INTO mq_partitions AS p (id, queue, name, tail, pushed_at, created_at)
    VALUES (d.partition, v_queue, d.partition_name, 1, clock(), clock())
    ON CONFLICT (id) DO UPDATE SET tail = p.tail + 1, pushed_at = clock() RETURNING p.tail INTO v_tail;
  INSERT INTO mq_messages (partition, seq, id, transaction_id, trace_id, grp, sealed, payload, created_at)
    VALUES (d.partition, v_tail, d.message_id, d.transaction_id, d.trace_id, v_grp, d.sealed, d.payload,
        date_trunc('milliseconds', clock()));
  DELETE FROM mq_dead x WHERE x.id = p_id;
  UPDATE mq_queues q SET size_most = q.size_most + 1 WHERE q.id = v_queue AND q.size_most IS NOT NULL;
  -- As a push does.
  INSERT INTO mq_ready (partition, grp, at, head)
    SELECT d.partition, g.id, clock(), CASE WHEN c.head IS NULL THEN v_tail - 1 END
    FROM mq_groups g LEFT JOIN mq_cursors c ON c.partition = d.partition AND c.grp = g.id
    WHERE g.queue = v_queue AND c.lease IS NULL AND CASE WHEN c.head IS NOT NULL THEN c.head >= v_tail - 1
      ELSE d.partition > g.reached IS NOT TRUE AND (SELECT x.grp FROM mq_ready x
          WHERE x.partition = d.partition AND x.grp = g.id) IS NULL END
    ON CONFLICT (partition, grp) DO NOTHING;
  PERFORM mq_tell(ARRAY[d.queue]);
  queue := d.queue; partition := d.partition; message_id := d.message_id; transaction_id := d.transaction_id;
  RETURN NEXT;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_requeue(p_partition uuid, p_grp integer, p_head bigint, p_not_before timestamp with time zone)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_tail bigint; v_pushed timestamptz; v_queue int; v_at timestamptz; q record;
BEGIN
  SELECT p.tail, p.pushed_at, p.queue INTO v_tail, v_pushed, v_queue FROM mq_partitions p WHERE p.id = p_partition;
  IF p_head >= v_tail THEN
    -- A concurrent push still sees the lease and leaves the row to us.
    SELECT p.tail, p.pushed_at, p.queue INTO v_tail, v_pushed, v_queue FROM mq_partitions p
      WHERE p.id = p_partition FOR SHARE;
  END IF;
  IF v_tail IS NULL OR p_head >= v_tail THEN RETURN; END IF;
  SELECT x.delay_seconds, x.window_seconds INTO q FROM mq_queues x WHERE x.id = v_queue;
  v_at := greatest(clock(), p_not_before);
  IF q.window_seconds > 0 THEN v_at := greatest(v_at, v_pushed + q.window_seconds * interval '1 second'); END IF;
  IF q.delay_seconds > 0 THEN
    v_at := greatest(v_at, (SELECT m.created_at FROM mq_messages m WHERE m.partition = p_partition AND m.seq > p_head
          ORDER BY m.seq LIMIT 1) + q.delay_seconds * interval '1 second');
  END IF;
  INSERT INTO mq_ready (partition, grp, at) VALUES (p_partition, p_grp, v_at)
    ON CONFLICT (partition, grp) DO UPDATE SET at = excluded.at;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_seek(p_queue text, p_group text, p_to text, p_at timestamp with time zone, p_after uuid, p_partitions integer, OUT moved bigint, OUT last uuid)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_queue int; v_grp int; r record; v_head bigint; v_lease uuid; v_leases uuid[] := '{}'; v_parts uuid[] := '{}';
BEGIN
  SELECT q.id, g.id INTO v_queue, v_grp FROM mq_queues q JOIN mq_groups g ON g.queue = q.id
    WHERE q.name = p_queue AND g.name = p_group;
  -- Nobody joins meanwhile.
  IF NOT FOUND OR NOT mq_guard(ARRAY[v_queue], false) THEN RETURN; END IF;
  UPDATE mq_queues q SET size_most = NULL WHERE q.id = v_queue AND q.size_most IS NOT NULL;
  moved := 0;
  FOR r IN SELECT p.id, p.tail, p.low FROM mq_partitions p
    WHERE p.queue = v_queue AND (p_after IS NULL OR p.id > p_after) ORDER BY p.id LIMIT p_partitions LOOP
    INSERT INTO mq_cursors AS x (partition, grp, head) VALUES (r.id, v_grp, 0)
      ON CONFLICT (partition, grp) DO UPDATE SET head = x.head RETURNING x.lease INTO v_lease;
    IF v_lease IS NOT NULL THEN v_leases := v_leases || v_lease; v_parts := v_parts || r.id; END IF;
    v_head := CASE p_to WHEN 'start' THEN r.low WHEN 'end' THEN r.tail ELSE mq_before(r.id, p_at) END;
    UPDATE mq_cursors x
      SET head = v_head, done = '{}', lease = NULL, batch = '{}', open = '{}', tries = '{}', careful = 0,
        not_before = NULL, moved_at = clock() WHERE x.partition = r.id AND x.grp = v_grp;
    DELETE FROM mq_ready d WHERE d.partition = r.id AND d.grp = v_grp;
    PERFORM mq_requeue(r.id, v_grp, v_head, NULL);
    moved := moved + 1; last := r.id;
  END LOOP;
  PERFORM mq_unlease(v_leases, v_parts);
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_size(p_queue integer)
 RETURNS bigint
 LANGUAGE sql
 STABLE
 SET search_path TO 'spillway'
AS $function$
  SELECT coalesce(sum(p.tail - b.behind - mq_holes(p.holes, b.behind, '{}')), 0)::bigint
    FROM mq_partitions p CROSS JOIN LATERAL (
    SELECT greatest(p.low, mq_slowest(p_queue, p.id, p.low, p.tail)) AS behind
  ) b WHERE p.queue = p_queue
$function$;

CREATE OR REPLACE FUNCTION spillway.mq_slowest(p_queue integer, p_partition uuid, p_low bigint, p_tail bigint)
 RETURNS bigint
 LANGUAGE sql
 STABLE
 SET search_path TO 'spillway'
AS $function$
  SELECT min(mq_head(c.head, r.head, g.reached, p_partition, p_low, p_tail)) FROM mq_groups g
    LEFT JOIN mq_cursors c ON c.partition = p_partition AND c.grp = g.id
    LEFT JOIN mq_ready r ON r.partition = p_partition AND r.grp = g.id WHERE g.queue = p_queue
$function$;

CREATE OR REPLACE FUNCTION spillway.mq_start(p_partition uuid, p_low bigint, p_starts timestamp with time zone)
 RETURNS bigint
 LANGUAGE sql
 STABLE
RETURN CASE WHEN (p_starts IS NULL) THEN p_low ELSE mq_before(p_partition, p_starts) END;

CREATE OR REPLACE FUNCTION spillway.mq_subscribe(p_queue integer, p_group text, p_mode text, p_from timestamp with time zone, p_partition text DEFAULT NULL::text, p_most integer DEFAULT NULL::integer, p_slice integer DEFAULT 500)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  g mq_groups; v_last uuid; v_head bigint;
BEGIN
  -- Without the guard, for which pushes wait, where there is nothing to do.
  SELECT x.* INTO g FROM mq_groups x WHERE x.queue = p_queue AND x.name = p_group AND x.reached IS NULL;
  IF FOUND THEN RETURN g.id; END IF;
  IF NOT mq_guard(ARRAY[p_queue], true) THEN RETURN NULL; END IF;
  SELECT x.* INTO g FROM mq_groups x WHERE x.queue = p_queue AND x.name = p_group;
  IF NOT FOUND THEN
    IF p_most <= (SELECT count(*) FROM mq_groups x WHERE x.queue = p_queue) THEN RETURN 0; END IF;
    -- The slowest group says how much a queue holds.
    UPDATE mq_queues q SET size_most = NULL WHERE q.id = p_queue AND q.size_most IS NOT NULL;
    INSERT INTO mq_groups (queue, name, mode, since, reached, starts, created_at)
      VALUES (p_queue, p_group, p_mode, coalesce(p_from, clock()),
      CASE WHEN p_mode = 'all' OR p_mode = 'time'
        AND p_from <= date_trunc('milliseconds', clock()) THEN '00000000-0000-0000-0000-000000000000'::uuid END, CASE
          WHEN p_mode = 'time' THEN p_from END, clock()) RETURNING * INTO g;
  END IF;
  IF g.reached IS NULL THEN RETURN g.id; END IF;
  IF p_partition IS NOT NULL THEN
    INSERT INTO mq_cursors (partition, grp, head) SELECT p.id, g.id, mq_start(p.id, p.low, g.starts)
      FROM mq_partitions p
      WHERE p.queue = p_queue AND p.name = p_partition AND p.id > g.reached ON CONFLICT (partition, grp) DO NOTHING
      RETURNING partition, head INTO v_last, v_head;
    IF FOUND THEN PERFORM mq_requeue(v_last, g.id, v_head, NULL); END IF;
    IF EXISTS (SELECT FROM mq_partitions p WHERE p.queue = p_queue AND p.name = p_partition) THEN RETURN g.id; END IF;
  END IF;
  SELECT p.id INTO v_last FROM mq_partitions p WHERE p.queue = p_queue AND p.id > g.reached
    ORDER BY p.id OFFSET p_slice - 1 LIMIT 1;
  -- The oldest partitions come first.
  INSERT INTO mq_ready (partition, grp, at, head) SELECT p.id, g.id, p.created_at, s.head
    FROM mq_partitions p LEFT JOIN mq_cursors c ON c.partition = p.id AND c.grp = g.id
      CROSS JOIN LATERAL (SELECT mq_start(p.id, p.low, g.starts) AS head) s
    WHERE p.queue = p_queue AND p.id > g.reached AND p.id > v_last IS NOT TRUE AND c.head IS NULL AND s.head < p.tail
    ORDER BY p.created_at, p.name;
  UPDATE mq_groups x SET reached = v_last WHERE x.id = g.id;
  RETURN g.id;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_sweep(p_most integer, p_after uuid, p_partitions integer, OUT removed bigint, OUT given_up bigint, OUT traces bigint, OUT last uuid)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  r record; c record; v_min bigint; v_upto bigint; v_gone bigint;
BEGIN
  removed := 0; given_up := 0;
  FOR r IN
    SELECT p.id, p.queue, p.low, p.tail, p.mark, p.marked_at, q.retention_enabled, q.retention_seconds,
      q.completed_retention_seconds, q.max_wait_seconds
           FROM mq_queues q JOIN mq_partitions p ON p.queue = q.id
           WHERE (q.retention_enabled OR q.max_wait_seconds > 0) AND p.low < p.tail
             AND (p_after IS NULL OR p.id > p_after)
           ORDER BY p.id LIMIT p_partitions LOOP
    EXIT WHEN removed >= p_most OR given_up >= p_most;
    last := r.id;
    -- Where a group joins at this moment, the next round gives up what waited too long.
    IF r.max_wait_seconds > 0
      AND pg_try_advisory_xact_lock_shared(hashtext('spillway.groups.' || current_schema()), r.queue) THEN
      v_upto := mq_before(r.id, t - r.max_wait_seconds * interval '1 second');
      INSERT INTO mq_cursors (partition, grp, head) SELECT r.id, g.id, h.head
        FROM mq_groups g LEFT JOIN mq_cursors x ON x.partition = r.id AND x.grp = g.id
        LEFT JOIN mq_ready y ON y.partition = r.id AND y.grp = g.id
          CROSS JOIN LATERAL (SELECT coalesce(y.head, CASE WHEN r.id > g.reached THEN mq_start(r.id, r.low, g.starts)
                ELSE r.tail END) AS head) h
        WHERE g.queue = r.queue AND v_upto > r.low AND x.head IS NULL AND h.head < v_upto ORDER BY g.id
        ON CONFLICT (partition, grp) DO NOTHING;
      FOR c IN SELECT x.grp FROM mq_cursors x WHERE x.partition = r.id AND x.head < v_upto AND x.lease IS NULL
        ORDER BY x.grp FOR UPDATE SKIP LOCKED LOOP
        given_up := given_up + mq_give_up(r.id, c.grp, v_upto, p_most);
        DELETE FROM mq_ready d WHERE d.partition = r.id AND d.grp = c.grp;
        PERFORM mq_requeue(x.partition, x.grp, x.head, NULL) FROM mq_cursors x
          WHERE x.partition = r.id AND x.grp = c.grp;
      END LOOP;
    END IF;
    CONTINUE WHEN NOT r.retention_enabled;
    IF r.retention_seconds > 0 THEN
      removed := removed + mq_cut(r.id, mq_before(r.id, t - r.retention_seconds * interval '1 second'), p_most);
    END IF;
    v_min := mq_slowest(r.queue, r.id, r.low, r.tail);
    IF r.completed_retention_seconds = 0 THEN
      IF v_min > r.low THEN removed := removed + mq_cut(r.id, v_min, p_most); END IF;
    ELSIF r.marked_at IS NULL OR r.marked_at <= t - r.completed_retention_seconds * interval '1 second' THEN
      IF r.marked_at IS NOT NULL AND r.mark > r.low THEN
        v_gone := mq_cut(r.id, r.mark, p_most);
        removed := removed + v_gone;
        -- Not all of it: the mark stands until it is.
        CONTINUE WHEN v_gone >= p_most;
      END IF;
      UPDATE mq_partitions p SET mark = greatest(p.mark, coalesce(v_min, 0)), marked_at = t
        WHERE p.id = r.id AND coalesce(v_min, 0) > p.low;
    END IF;
  END LOOP;
  WITH old AS (DELETE FROM mq_traces x
      WHERE x.id IN (SELECT y.id FROM (SELECT z.id, z.created_at FROM mq_traces z ORDER BY z.id LIMIT p_most) y
          WHERE y.created_at < t - interval '30 days') RETURNING 1) SELECT count(*) INTO traces FROM old;
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_tell(p_queues text[])
 RETURNS void
 LANGUAGE sql
 SET search_path TO 'spillway'
AS $function$
  SELECT pg_notify('spillway_' || current_schema(), 'mq:' || CASE WHEN cardinality(p_queues) > 500 THEN '*'
      ELSE (SELECT string_agg(left(md5(n), 8), ',') FROM unnest(p_queues) n) END)
$function$;

CREATE OR REPLACE FUNCTION spillway.mq_unlease(p_leases uuid[], p_partitions uuid[])
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
BEGIN
  IF cardinality(p_leases) = 0 THEN RETURN; END IF;
  -- Mostly it is one lease with one partition.
  DELETE FROM mq_leases l WHERE cardinality(p_leases) = 1 AND l.id = p_leases[1] AND l.partitions <@ p_partitions;
  IF FOUND THEN RETURN; END IF;
  PERFORM FROM mq_leases l WHERE l.id = ANY (p_leases) ORDER BY l.id FOR UPDATE;
  UPDATE mq_leases l SET partitions = ARRAY(SELECT p FROM unnest(l.partitions) p WHERE NOT p = ANY (u.parts))
    FROM (SELECT x.lease, array_agg(x.part) AS parts FROM unnest(p_leases, p_partitions) x(lease, part)
        GROUP BY x.lease) u WHERE l.id = u.lease;
  DELETE FROM mq_leases l WHERE l.id = ANY (p_leases) AND l.partitions = '{}';
END $function$;

CREATE OR REPLACE FUNCTION spillway.mq_unsubscribe(p_group text, p_queue text, p_forget boolean)
 RETURNS TABLE(queue text, partitions bigint)
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  r record;
BEGIN
  PERFORM mq_guard(ARRAY(SELECT g.queue FROM mq_groups g JOIN mq_queues q ON q.id = g.queue
        WHERE g.name = p_group AND (p_queue IS NULL OR q.name = p_queue)), true);
  FOR r IN SELECT g.id, g.queue, g.mode, g.since, q.name, (SELECT count(*) FROM mq_cursors c WHERE c.grp = g.id) AS n
           FROM mq_groups g JOIN mq_queues q ON q.id = g.queue
           WHERE g.name = p_group AND (p_queue IS NULL OR q.name = p_queue) ORDER BY g.id LOOP
    DELETE FROM mq_cursors c WHERE c.grp = r.id;
    DELETE FROM mq_ready x WHERE x.grp = r.id;
    DELETE FROM mq_leases l WHERE l.grp = r.id;
    DELETE FROM mq_groups g WHERE g.id = r.id;
    IF NOT p_forget THEN PERFORM mq_subscribe(r.queue, p_group, CASE WHEN r.mode = 'all' THEN 'all'
        ELSE 'time' END, r.since); END IF;
    queue := r.name; partitions := r.n;
    RETURN NEXT;
  END LOOP;
END $function$;

CREATE OR REPLACE FUNCTION spillway.objective_add(p_writer uuid, p_number bigint, p_objectives text[], p_good double precision[], p_total double precision[])
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  INSERT INTO objective_writers AS w (writer, sent, at) VALUES (p_writer, p_number, t)
    ON CONFLICT (writer) DO UPDATE SET sent = EXCLUDED.sent, at = EXCLUDED.at WHERE w.sent < EXCLUDED.sent;
  IF NOT FOUND THEN RETURN false; END IF;
  INSERT INTO objective_counts AS c (objective, span, bucket, good, total)
    SELECT u.objective, s.span, date_trunc(s.span, t, 'UTC'), u.good, u.total
    FROM unnest(p_objectives, p_good, p_total) u(objective, good, total), (VALUES ('minute'), ('hour')) s(span)
    ORDER BY u.objective, s.span
    ON CONFLICT (objective, span, bucket) DO UPDATE SET good = c.good + EXCLUDED.good, total = c.total + EXCLUDED.total;
  RETURN true;
END $function$;

CREATE OR REPLACE FUNCTION spillway.objective_sums()
 RETURNS TABLE(objective text, hour_good double precision, hour_total double precision, month_good double precision, month_total double precision)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  RETURN QUERY SELECT c.objective,
      coalesce(sum(c.good) FILTER (WHERE c.span = 'minute'), 0),
        coalesce(sum(c.total) FILTER (WHERE c.span = 'minute'), 0),
      coalesce(sum(c.good) FILTER (WHERE c.span = 'hour'), 0), coalesce(sum(c.total) FILTER (WHERE c.span = 'hour'), 0)
    FROM objective_counts c
    WHERE c.bucket > t - CASE c.span WHEN 'minute' THEN interval '1 hour' ELSE interval '30 days' END
    GROUP BY c.objective;
END $function$;

CREATE OR REPLACE FUNCTION spillway.objective_sweep()
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_n int;
BEGIN
  IF NOT pg_try_advisory_xact_lock(hashtext('spillway.objective_sweep'), hashtext(current_schema())) THEN
    RETURN 0;
  END IF;
  DELETE FROM objective_counts c
    WHERE c.bucket < t - CASE c.span WHEN 'minute' THEN interval '2 hours' ELSE interval '31 days' END;
  GET DIAGNOSTICS v_n = ROW_COUNT;
  -- None is silent for so long and then sends a batch again.
  DELETE FROM objective_writers w WHERE w.at < t - interval '1 day';
  RETURN v_n;
END $function$;

CREATE OR REPLACE FUNCTION spillway.ops_complete(p_lanes uuid[], p_from bigint[], p_heads bigint[], p_ago_ms bigint[], p_queues text[], p_partitions text[], p_at timestamp with time zone)
 RETURNS bigint
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.ops_finish(r_lane uuid[], r_seq bigint[], r_status text[], r_result text[], r_error text[], r_ago_ms bigint[], r_counted boolean[], p_at timestamp with time zone)
 RETURNS bigint
 LANGUAGE plpgsql
AS $function$
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
        attempts, max_attempts, error, result, trace)
    SELECT g.id, p_at, g.status, g.type, l.queue, l.partition, g.priority, g.identity, g.accepted_at,
      CASE WHEN g.counted THEN p_at - g.ago * interval '1 ms' END, g.attempts + g.counted::int, g.max_attempts, g.why,
      g.result::json, g.trace
    FROM gone g JOIN lanes l ON l.id = g.lane WHERE g.status <> 'failed'
    RETURNING 1
  ), died AS (
    INSERT INTO dead_letters (id, died_at, lane, seq, queue, partition, type, priority, identity, payload, accepted_at,
        started_at, attempts, max_attempts, timeout_ms, error, result, trace, gate)
    SELECT g.id, p_at, g.lane, g.seq, l.queue, l.partition, g.type, g.priority, g.identity, g.payload, g.accepted_at,
      CASE WHEN g.counted THEN p_at - g.ago * interval '1 ms' END, g.attempts + g.counted::int, g.max_attempts,
      g.timeout_ms, g.why, g.result::json, g.trace, g.gate
    FROM gone g JOIN lanes l ON l.id = g.lane WHERE g.status = 'failed'
    RETURNING 1
  )
  SELECT (SELECT count(*) FROM kept) + (SELECT count(*) FROM died) INTO v_gone;
  RETURN v_gone;
END $function$;

CREATE OR REPLACE FUNCTION spillway.ops_retry(p_lanes uuid[], p_heads bigint[], p_retry_ms bigint[], p_errors text[], p_labels text[], p_at timestamp with time zone)
 RETURNS void
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.pause(p_queue text, p_partition text)
 RETURNS void
 LANGUAGE sql
 SET search_path TO 'spillway'
AS $function$
  INSERT INTO pauses (queue, partition, since) VALUES (p_queue, p_partition, clock()) ON CONFLICT DO NOTHING
$function$;

CREATE OR REPLACE FUNCTION spillway.pause_check(p_queues text[], p_partitions text[], p_may_run boolean[], p_type text)
 RETURNS boolean[]
 LANGUAGE sql
 STABLE
AS $function$
  SELECT array_agg(u.may_run AND NOT EXISTS (SELECT FROM pauses s WHERE CASE WHEN s.queue = '' THEN s.partition = p_type
      ELSE s.queue = u.queue AND (s.partition IS NULL OR s.partition = u.partition) END) ORDER BY u.i)
  FROM unnest(p_queues, p_partitions, p_may_run) WITH ORDINALITY u(queue, partition, may_run, i)
$function$;

CREATE OR REPLACE FUNCTION spillway.pause_guard()
 RETURNS boolean
 LANGUAGE plpgsql
AS $function$
BEGIN
  IF NOT EXISTS (SELECT FROM pauses) THEN RETURN false; END IF;
  PERFORM pg_advisory_xact_lock_shared(hashtext('spillway.pauses'), hashtext(current_schema()));
  RETURN EXISTS (SELECT FROM pauses);
END $function$;

CREATE OR REPLACE FUNCTION spillway.petition_overflow()
 RETURNS trigger
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
BEGIN
  PERFORM ledger_append(ARRAY['petition.queue.overflow.' || CASE WHEN NEW.overflowing THEN 'started'
        ELSE 'ended' END], ARRAY['system'], ARRAY[''],
    ARRAY['{"depth":' || NEW.held || ',"resume_below":' || NEW.resume_below || ',"threshold":' || NEW.full_at || '}']);
  PERFORM pg_notify('spillway_' || current_schema(), 'petition_overflow:');
  RETURN NULL;
END $function$;

CREATE OR REPLACE FUNCTION spillway.petition_overflows(p_worker uuid, p_after bigint, p_rows integer, OUT after bigint, OUT overflows json)
 RETURNS record
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
BEGIN
  after := coalesce(p_after, (SELECT max(l.seq) FROM ledger l
        WHERE l.type IN ('petition.queue.overflow.started', 'petition.queue.overflow.ended')
    AND l.at < coalesce((SELECT date_trunc('milliseconds', w.started_at) FROM workers w
          WHERE w.id = p_worker), clock())), 0);
  SELECT coalesce(max(x.seq), after), json_agg(json_build_object('seq', x.seq, 'type', x.type, 'payload', x.payload)
      ORDER BY x.seq) INTO after, overflows FROM (
    SELECT l.seq, l.type, l.payload FROM ledger l
      WHERE l.type IN ('petition.queue.overflow.started', 'petition.queue.overflow.ended') AND l.seq > after
    ORDER BY l.seq LIMIT p_rows) x;
END $function$;

CREATE OR REPLACE FUNCTION spillway.petition_transition(p_id uuid, p_to text, p_fate text, p_reason text, p_event text, p_actor text, p_trace text, p_submitter text)
 RETURNS TABLE(outcome text, petition petitions)
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v petitions; v_from text; t timestamptz;
BEGIN
  SELECT x.* INTO v FROM petitions x WHERE x.id = p_id FOR UPDATE;
  IF NOT FOUND THEN
    outcome := 'unknown';
  ELSIF p_submitter IS NOT NULL AND v.submitter <> p_submitter THEN
    outcome := 'foreign';
  ELSIF (v.state, p_to) NOT IN (('RECEIVED', 'DELIBERATING'), ('RECEIVED', 'ACKNOWLEDGED'), ('RECEIVED', 'ESCALATED'),
      ('DELIBERATING', 'ACKNOWLEDGED'), ('DELIBERATING', 'REFERRED'), ('DELIBERATING', 'ESCALATED'),
        ('DELIBERATING', 'DEFERRED'), ('DELIBERATING', 'NO_RESPONSE'))
      OR (p_submitter IS NOT NULL AND v.state <> 'RECEIVED') THEN
    outcome := 'illegal';
  ELSE
    outcome := 'done';
    v_from := v.state;
    IF v.state = 'RECEIVED' THEN PERFORM gates_release(ARRAY['petitions'], ARRAY[1::bigint]); END IF;
    PERFORM FROM petition_states s WHERE s.state IN (v.state, p_to) ORDER BY s.state FOR UPDATE;
    UPDATE petition_states s SET n = s.n + CASE WHEN s.state = p_to THEN 1 ELSE -1 END WHERE s.state IN (v.state, p_to);
    t := date_trunc('milliseconds', clock());
    UPDATE petitions x
      SET state = p_to, came_from = x.state, fate_reason = p_fate, version = x.version + 1,
        updated_at = greatest(t, x.updated_at)
      WHERE x.id = p_id RETURNING x.* INTO v;
    PERFORM ledger_append(ARRAY[p_event], ARRAY[p_actor], ARRAY[p_trace], ARRAY[
      '{"from":"' || v_from || '","petition_id":"' || p_id || '","reason":'
        || coalesce(to_json(p_reason)::text, 'null') || ',"to":"' || p_to || '"}']);
    PERFORM pg_notify('spillway_' || current_schema(), 'petition:' || p_id);
  END IF;
  petition := v;
  RETURN NEXT;
END $function$;

CREATE OR REPLACE FUNCTION spillway.petitions_audit()
 RETURNS TABLE(fault text)
 LANGUAGE sql
 STABLE
 SET search_path TO 'spillway'
AS $function$
  SELECT 'petitions in ' || s.state || ': ' || s.n || ' counted, ' || c.n || ' there' FROM petition_states s,
    LATERAL (SELECT count(*) AS n FROM petitions p WHERE p.state = s.state) c WHERE s.n <> c.n
  UNION ALL
  SELECT 'the gate holds ' || g.held || ' places, for ' || s.n || ' received and ' || o.n || ' queued'
    FROM gates g, petition_states s,
    LATERAL (SELECT count(*) AS n FROM ops x WHERE x.gate = 'petitions') o
    WHERE g.name = 'petitions' AND s.state = 'RECEIVED' AND g.held <> s.n + o.n
  UNION ALL
  SELECT 'petition ' || p.id || ' has no event of its receipt' FROM petitions p
    WHERE p.id NOT IN (SELECT (l.payload::json->>'petition_id')::uuid FROM ledger l
        WHERE l.type = 'petition.submission.received')
$function$;

CREATE OR REPLACE FUNCTION spillway.petitions_blocked(p_verdicts text[], p_submitters text[], p_traces text[])
 RETURNS json
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_minute bigint := floor(extract(epoch FROM t) / 60);
  v_who text[]; v_counts bigint[]; v_traces text[];
BEGIN
  WITH blocked AS (
    SELECT u.who, count(*) AS n, (array_agg(u.trace))[1] AS trace
      FROM unnest(p_verdicts, p_submitters, p_traces) u(verdict, who, trace)
    WHERE u.verdict = 'rate_limited' GROUP BY u.who
  ), known AS MATERIALIZED (
    SELECT x.submitter, x.minute, x.pending FROM petition_blocks x WHERE x.submitter IN (SELECT b.who FROM blocked b)
      FOR UPDATE
  ), noted AS (
    INSERT INTO petition_blocks AS x (submitter, minute, pending) SELECT b.who, v_minute, b.n - 1 FROM blocked b
      ON CONFLICT (submitter) DO UPDATE SET
        pending = CASE WHEN x.minute < v_minute THEN excluded.pending ELSE x.pending + excluded.pending + 1 END,
        minute = greatest(x.minute, v_minute)
  )
  SELECT array_agg(b.who), array_agg(coalesce(k.pending, 0) + 1), array_agg(b.trace) INTO v_who, v_counts, v_traces
    FROM blocked b LEFT JOIN known k ON k.submitter = b.who WHERE k.minute IS NULL OR k.minute < v_minute;
  RETURN json_build_object('as_of_seq', petitions_witness_blocks(v_who, v_counts, v_traces),
    'cycle_id', to_char(t AT TIME ZONE 'UTC', 'YYYY-"Q"Q'));
END $function$;

CREATE OR REPLACE FUNCTION spillway.petitions_forget_blocks(p_rows integer)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_minute bigint := floor(extract(epoch FROM clock()) / 60);
  v_n int;
BEGIN
  -- Not under the gate, for which petitions wait, while there is nothing to forget.
  IF NOT EXISTS (SELECT FROM petition_blocks b WHERE b.pending = 0 AND b.minute < v_minute - 60) THEN RETURN 0; END IF;
  PERFORM FROM gates g WHERE g.name = 'petitions' FOR UPDATE;
  DELETE FROM petition_blocks d
    WHERE d.ctid = ANY (ARRAY(SELECT b.ctid FROM petition_blocks b WHERE b.pending = 0 AND b.minute < v_minute - 60
          ORDER BY b.minute LIMIT p_rows FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS v_n = ROW_COUNT;
  RETURN v_n;
END $function$;

CREATE OR REPLACE FUNCTION spillway.petitions_submitted(p_verdicts text[], p_seqs bigint[], p_ids uuid[], p_types text[], p_texts text[], p_hashes text[], p_realms text[], p_submitters text[], p_traces text[], p_payloads text[])
 RETURNS json[]
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := date_trunc('milliseconds', clock());
  v_at text := to_char(t AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"');
  v_n int; v_limited boolean;
  v_actors text[]; v_traces text[]; v_payloads text[];
  told json[]; v_state json;
BEGIN
  -- No ORDER BY: a function scan gives its rows in order.
  SELECT count(*) FILTER (WHERE u.verdict = 'apply'), coalesce(bool_or(u.verdict = 'rate_limited'), false),
         array_agg('submitter:' || u.submitter) FILTER (WHERE u.verdict = 'apply'),
         array_agg(u.trace) FILTER (WHERE u.verdict = 'apply'), array_agg(u.payload) FILTER (WHERE u.verdict = 'apply'),
         array_agg(CASE WHEN u.verdict = 'apply' THEN ('{"petition_id":"' || u.id || '","state":"RECEIVED","type":"'
               || u.type || '","content_hash":"' || u.hash
           || '","realm":' || coalesce(to_json(u.realm)::text, 'null') || ',"created_at":"' || v_at || '"}')::json END)
    INTO v_n, v_limited, v_actors, v_traces, v_payloads, told
    FROM unnest(p_verdicts, p_ids, p_types, p_hashes, p_realms, p_submitters, p_traces, p_payloads) u(verdict, id,
        type, hash, realm, submitter, trace, payload);
  IF v_n > 0 THEN
    INSERT INTO petitions (id, type, state, text, content_hash, realm, submitter, created_at, updated_at)
      SELECT u.id, u.type, 'RECEIVED', u.text, u.hash, u.realm, u.submitter, t, t
      FROM unnest(p_verdicts, p_ids, p_types, p_texts, p_hashes, p_realms, p_submitters) u(verdict, id, type, text,
          hash, realm, submitter)
      WHERE u.verdict = 'apply';
    UPDATE petition_states s SET n = s.n + v_n WHERE s.state = 'RECEIVED';
    PERFORM ledger_append(array_fill('petition.submission.received'::text, ARRAY[v_n]), v_actors, v_traces, v_payloads);
  END IF;
  IF v_limited THEN
    v_state := petitions_blocked(p_verdicts, p_submitters, p_traces);
    SELECT array_agg(CASE WHEN u.verdict = 'rate_limited' THEN v_state ELSE u.told END) INTO told
      FROM unnest(p_verdicts, told) u(verdict, told);
  END IF;
  RETURN told;
END $function$;

CREATE OR REPLACE FUNCTION spillway.petitions_tell_blocks(p_rows integer, OUT told integer)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_minute bigint := floor(extract(epoch FROM clock()) / 60);
  v_who text[]; v_counts bigint[];
BEGIN
  PERFORM FROM gates g WHERE g.name = 'petitions' FOR UPDATE;
  SELECT array_agg(x.submitter), array_agg(x.pending) INTO v_who, v_counts FROM (
    SELECT b.submitter, b.pending FROM petition_blocks b WHERE b.pending > 0 AND b.minute < v_minute
      ORDER BY b.submitter LIMIT p_rows FOR UPDATE SKIP LOCKED) x;
  told := coalesce(cardinality(v_who), 0);
  IF told > 0 THEN
    UPDATE petition_blocks b SET pending = 0, minute = v_minute WHERE b.submitter = ANY (v_who);
    PERFORM petitions_witness_blocks(v_who, v_counts, array_fill(''::text, ARRAY[told]));
  END IF;
END $function$;

CREATE OR REPLACE FUNCTION spillway.petitions_witness_blocks(p_who text[], p_counts bigint[], p_traces text[])
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_actors text[]; v_payloads text[];
BEGIN
  IF p_who IS NULL THEN RETURN (SELECT h.seq FROM ledger_head h); END IF;
  SELECT array_agg('submitter:' || u.who),
    array_agg('{"count":' || u.n || ',"submitter_id":' || to_json(u.who)::text || '}') INTO v_actors, v_payloads
    FROM unnest(p_who, p_counts) u(who, n);
  RETURN ledger_append(array_fill('petition.rate_limit.blocked'::text, ARRAY[cardinality(p_who)]), v_actors,
      p_traces, v_payloads);
END $function$;

CREATE OR REPLACE FUNCTION spillway.promote(p_most integer)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET jit TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_n int;
BEGIN
  IF NOT EXISTS (SELECT FROM parked p WHERE p.until <= t) THEN RETURN 0; END IF;
  WITH due AS (
    SELECT p.lane FROM parked p WHERE p.until <= t ORDER BY p.until LIMIT p_most FOR UPDATE SKIP LOCKED
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
  RETURN v_n;
END $function$;

CREATE OR REPLACE FUNCTION spillway.pulse(p_worker uuid, p_lease_ms bigint, p_running json)
 RETURNS TABLE(alive boolean, now_ms double precision, waiting boolean, next_due_ms bigint, oldest_ms bigint, held json, running json, gates json, halts json, cancels json, lost integer)
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.purge(p_ids uuid[])
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
DECLARE
  v_n int;
BEGIN
  DELETE FROM dead_letters x WHERE x.id = ANY (p_ids);
  GET DIAGNOSTICS v_n = ROW_COUNT;
  PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, '!dead', - v_n) WHERE v_n > 0;
  RETURN v_n;
END $function$;

CREATE OR REPLACE FUNCTION spillway.rate_counts(p_minutes integer[], p_counts integer[], p_now integer, p_keep integer, p_n integer)
 RETURNS integer[]
 LANGUAGE sql
 IMMUTABLE
AS $function$
  SELECT coalesce((SELECT array_agg(c ORDER BY m) FROM unnest(p_minutes, p_counts) u(m, c)
        WHERE m > p_now - p_keep AND m < p_now), '{}')
    || (p_n + coalesce((SELECT sum(c)::int FROM unnest(p_minutes, p_counts) u(m, c) WHERE m >= p_now), 0))
$function$;

CREATE OR REPLACE FUNCTION spillway.rate_minutes(p_minutes integer[], p_now integer, p_keep integer)
 RETURNS integer[]
 LANGUAGE sql
 IMMUTABLE
AS $function$
  SELECT coalesce((SELECT array_agg(m ORDER BY m) FROM unnest(p_minutes) m
        WHERE m > p_now - p_keep AND m < p_now), '{}') || p_now
$function$;

CREATE OR REPLACE FUNCTION spillway.rate_span(p_kept integer, p_window integer, p_keep interval)
 RETURNS integer
 LANGUAGE sql
 IMMUTABLE
AS $function$
  SELECT CASE WHEN p_kept <= p_window THEN p_window
    ELSE greatest(p_window, least(p_kept, (extract(epoch FROM p_keep) / 60)::int)) END
$function$;

CREATE OR REPLACE FUNCTION spillway.rate_used(p_minutes integer[], p_counts integer[], p_now integer, p_window integer)
 RETURNS bigint
 LANGUAGE sql
 IMMUTABLE
AS $function$
  SELECT coalesce(sum(c), 0) FROM unnest(p_minutes, p_counts) u(m, c) WHERE m > p_now - p_window
$function$;

CREATE OR REPLACE FUNCTION spillway.rate_wait_ms(p_minutes integer[], p_counts integer[], p_at timestamp with time zone, p_window integer, p_below bigint)
 RETURNS bigint
 LANGUAGE sql
 IMMUTABLE
AS $function$
  SELECT greatest(1, ceil(extract(epoch FROM to_timestamp((min(m) + p_window)::bigint * 60) - p_at) * 1000))::bigint
  FROM (
    SELECT m, sum(c) OVER (ORDER BY m DESC) - c AS later
    FROM unnest(p_minutes, p_counts) u(m, c)
    WHERE m > floor(extract(epoch FROM p_at) / 60)::int - p_window AND c > 0
  ) b
  WHERE later <= p_below
$function$;

CREATE OR REPLACE FUNCTION spillway.rates_asked(p_ix integer[], p_item integer[], p_decided text[], p_keys integer)
 RETURNS integer[]
 LANGUAGE sql
 STABLE
AS $function$
  SELECT array_agg(coalesce(x.n, 0)::int ORDER BY k.i) FROM generate_series(1, p_keys) k(i)
    LEFT JOIN (SELECT u.ix, count(*) AS n FROM unnest(p_ix, p_item) WITH ORDINALITY u(ix, item, i)
      WHERE p_decided[coalesce(u.item, u.i)] IS NULL GROUP BY u.ix) x ON x.ix = k.i
$function$;

CREATE OR REPLACE FUNCTION spillway.rates_return(p_keys uuid[], p_asked integer[], p_gave integer[])
 RETURNS void
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
BEGIN
  UPDATE rates x SET total = x.total - u.back,
      counts = x.counts[1:cardinality(x.counts) - 1] || (x.counts[cardinality(x.counts)] - u.back)
    FROM unnest(p_keys, p_asked, p_gave) k(key, asked, gave), LATERAL (SELECT k.asked - k.gave) u(back)
    WHERE x.key = k.key AND u.back > 0;
END $function$;

CREATE OR REPLACE FUNCTION spillway.rates_status(p_ix integer[], p_item integer[], p_items integer, p_verdicts text[], p_left integer[], p_gave integer[], p_waits_ms bigint[], OUT tiers integer[], OUT rates_left bigint[], OUT rates_reset_ms bigint[])
 RETURNS record
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.rates_take(p_keys uuid[], p_asked integer[], p_limits integer[], p_windows integer[], p_keep integer[], p_at timestamp with time zone, OUT left_now integer[], OUT waits_ms bigint[], OUT is_tight boolean, OUT is_odd boolean)
 RETURNS record
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
DECLARE
  v_minute int := floor(extract(epoch FROM p_at) / 60)::int;
  v_longer boolean;
BEGIN
  WITH up AS (
    INSERT INTO rates AS x (key, win, minutes, counts, total, expires_at, sweep_at)
    SELECT k.key, k.win, ARRAY[v_minute], ARRAY[k.n], k.n, p_at + k.keep * interval '1 minute',
      p_at + k.keep * interval '1 minute'
    FROM unnest(p_keys, p_asked, p_windows, p_keep) k(key, n, win, keep)
    ON CONFLICT (key) DO UPDATE SET
      minutes = CASE WHEN x.minutes[1] > v_minute - excluded.win
        THEN CASE WHEN x.minutes[cardinality(x.minutes)] >= v_minute THEN x.minutes ELSE x.minutes || v_minute END
        ELSE rate_minutes(x.minutes, v_minute,
          rate_span(x.win, excluded.win, greatest(x.expires_at, excluded.expires_at) - p_at)) END,
      counts = CASE WHEN x.minutes[1] > v_minute - excluded.win
        THEN CASE WHEN x.minutes[cardinality(x.minutes)] >= v_minute
          THEN x.counts[1:cardinality(x.counts) - 1] || (x.counts[cardinality(x.counts)] + excluded.total)
          ELSE x.counts || excluded.total END
        ELSE rate_counts(x.minutes, x.counts, v_minute,
          rate_span(x.win, excluded.win, greatest(x.expires_at, excluded.expires_at) - p_at), excluded.total) END,
      total = excluded.total + CASE WHEN x.minutes[1] > v_minute - excluded.win THEN x.total
        ELSE rate_used(x.minutes, x.counts, v_minute,
          rate_span(x.win, excluded.win, greatest(x.expires_at, excluded.expires_at) - p_at))::int END,
      win = rate_span(x.win, excluded.win, greatest(x.expires_at, excluded.expires_at) - p_at),
      expires_at = greatest(x.expires_at, excluded.expires_at)
    RETURNING x.total, x.minutes[1] AS first, x.counts[1] AS first_n
  ), seen AS (
    SELECT array_agg(up.total) AS totals, array_agg(up.first) AS firsts, array_agg(up.first_n) AS first_ns FROM up
  )
  SELECT array_agg(u.most - (u.total - u.asked)), coalesce(bool_or(u.total > u.most), false), bool_or(u.first_n = 0),
      bool_or(u.first <= v_minute - u.win),
      array_agg(greatest(1, ceil(((u.first + u.win)::bigint * 60 - date_part('epoch', p_at)) * 1000))::bigint)
    INTO left_now, is_tight, is_odd, v_longer, waits_ms
    FROM seen, unnest(seen.totals, p_asked, p_limits, p_windows, seen.firsts, seen.first_ns)
      u(total, asked, most, win, first, first_n);
  IF v_longer THEN
    -- Only what is in the window of this process counts here.
    is_odd := true;
    SELECT array_agg(u.most - (k.used - u.asked) ORDER BY u.i), bool_or(k.used > u.most) INTO left_now, is_tight
      FROM unnest(p_keys, p_asked, p_limits, p_windows) WITH ORDINALITY u(key, asked, most, win, i)
      JOIN rates x ON x.key = u.key,
        LATERAL (SELECT rate_used(x.minutes, x.counts, v_minute, u.win)::int) k(used);
  END IF;
END $function$;

CREATE OR REPLACE FUNCTION spillway.rates_waits(p_keys uuid[], p_limits integer[], p_windows integer[], p_at timestamp with time zone)
 RETURNS bigint[]
 LANGUAGE sql
 STABLE
AS $function$
  SELECT array_agg(coalesce(rate_wait_ms(x.minutes, x.counts, p_at, u.win, greatest(0, least(u.most,
      rate_used(x.minutes, x.counts, floor(extract(epoch FROM p_at) / 60)::int, u.win)) - 1)), 1) ORDER BY u.i)
  FROM unnest(p_keys, p_windows, p_limits) WITH ORDINALITY u(key, win, most, i) JOIN rates x ON x.key = u.key
$function$;

CREATE OR REPLACE FUNCTION spillway.ration(p_gates text[], p_names text[], p_gates_left bigint[], p_rate_ix integer[], p_rate_item integer[], p_rates_left integer[], p_decided text[], p_items integer, OUT verdicts text[], OUT gates_gave bigint[], OUT rates_gave integer[])
 RETURNS record
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.ready_types(p_types text[])
 RETURNS text[]
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'spillway'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
#variable_conflict use_column
BEGIN
  IF p_types IS NULL THEN RETURN CASE WHEN EXISTS (SELECT FROM ready x) THEN '{}'::text[] END; END IF;
  RETURN (SELECT array_agg(u.type) FROM unnest(p_types) u(type)
      WHERE EXISTS (SELECT FROM ready x WHERE x.type = u.type));
END $function$;

CREATE OR REPLACE FUNCTION spillway.recover()
 RETURNS TABLE(worker uuid, name text, lanes integer)
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.redrive(p_ids uuid[])
 RETURNS TABLE(moved integer, skipped integer)
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
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
  FOR d IN SELECT x.* FROM dead_letters x WHERE x.id = ANY (p_ids) ORDER BY x.lane, x.seq LOOP
    IF d.gate IS NOT NULL THEN
      UPDATE gates x SET held = x.held + 1, overflowing = x.held + 1 >= x.full_at
        WHERE x.name = d.gate AND NOT x.overflowing AND x.held < x.full_at;
      IF NOT FOUND THEN
        skipped := skipped + 1;
        CONTINUE;
      END IF;
    END IF;
    INSERT INTO lanes AS l (id, queue, partition, tail, depth, moved_at, sweep_at)
      VALUES (d.lane, d.queue, d.partition, 1, 1, t, t + interval '1 hour')
      ON CONFLICT (id) DO UPDATE SET tail = l.tail + 1, depth = l.depth + 1,
        moved_at = CASE WHEN l.depth = 0 THEN t ELSE l.moved_at END
      RETURNING l.depth, l.tail INTO v_depth, v_tail;
    v_stamp := coalesce((SELECT x.stamp FROM ready x WHERE x.priority = d.priority ORDER BY x.stamp
          LIMIT 1), (SELECT s.last_value FROM stamps s));
    INSERT INTO ops (lane, seq, id, type, priority, stamp, identity, payload, accepted_at, max_attempts, timeout_ms,
        trace, gate)
      VALUES (d.lane, v_tail, d.id, d.type, d.priority, v_stamp, d.identity, d.payload, d.accepted_at,
          d.max_attempts, d.timeout_ms, d.trace, d.gate);
    IF v_depth = 1 THEN PERFORM lane_requeue(d.lane); END IF;
    DELETE FROM dead_letters x WHERE x.id = d.id;
    DELETE FROM cancels x WHERE x.id = d.id;
    PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, d.type, 1);
    moved := moved + 1;
  END LOOP;
  PERFORM tally('00000000-0000-0000-0000-000000000000', -1::smallint, '!dead', - moved) WHERE moved > 0;
  RETURN NEXT;
END $function$;

CREATE OR REPLACE FUNCTION spillway.resume(p_queue text, p_partition text)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_lane uuid;
BEGIN
  PERFORM pg_advisory_xact_lock(hashtext('spillway.pauses'), hashtext(current_schema()));
  DELETE FROM pauses p WHERE p.queue = p_queue AND (p_partition IS NULL OR p.partition = p_partition);
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.retire(p_worker uuid)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
DECLARE
  v_n int;
BEGIN
  PERFORM FROM workers x WHERE x.id = p_worker FOR UPDATE;
  v_n := leases_return((SELECT coalesce(array_agg(l.fence), '{}') FROM leases l WHERE l.worker = p_worker), false);
  PERFORM worker_forget(p_worker);
  RETURN v_n;
END $function$;

CREATE OR REPLACE FUNCTION spillway.rt_admit(p_verdicts text[], p_seqs bigint[])
 RETURNS json[]
 LANGUAGE sql
 STABLE
AS $function$
  SELECT array_agg(CASE WHEN u.verdict = 'apply' THEN '{}'::json END) FROM unnest(p_verdicts) u(verdict)
$function$;

CREATE OR REPLACE FUNCTION spillway.rt_block_put(p_type text, p_version text, p_body text, p_replace boolean, p_max integer, OUT outcome text, OUT created_at timestamp with time zone, OUT updated_at timestamp with time zone)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_count int;
  t timestamptz := date_trunc('milliseconds', clock());
BEGIN
  SELECT s.blocks INTO v_count FROM rt_state s FOR UPDATE;
  SELECT b.created_at INTO created_at FROM rt_blocks b WHERE b.type = p_type AND b.version = p_version;
  IF FOUND THEN
    outcome := CASE WHEN p_replace THEN 'replaced' ELSE 'exists' END;
    IF NOT p_replace THEN RETURN; END IF;
    UPDATE rt_blocks b SET body = p_body::json, updated_at = t WHERE b.type = p_type AND b.version = p_version;
  ELSE
    outcome := CASE WHEN v_count >= p_max THEN 'full' ELSE 'created' END;
    IF outcome = 'full' THEN RETURN; END IF;
    created_at := t;
    INSERT INTO rt_blocks (type, version, body, created_at, updated_at) VALUES (p_type, p_version, p_body::json, t, t);
    UPDATE rt_state s SET blocks = s.blocks + 1;
  END IF;
  updated_at := t;
END $function$;

CREATE OR REPLACE FUNCTION spillway.rt_block_remove(p_type text, p_version text)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
BEGIN
  PERFORM FROM rt_state s FOR UPDATE;
  DELETE FROM rt_blocks b WHERE b.type = p_type AND b.version = p_version;
  IF NOT FOUND THEN RETURN false; END IF;
  UPDATE rt_state s SET blocks = s.blocks - 1;
  RETURN true;
END $function$;

CREATE OR REPLACE FUNCTION spillway.rt_policy_put(p_tenant text, p_id text, p_body text, p_max integer, OUT outcome text, OUT version integer, OUT updated_at timestamp with time zone)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_change bigint; v_count int;
  t timestamptz := date_trunc('milliseconds', clock());
BEGIN
  SELECT s.change + 1, s.policies INTO v_change, v_count FROM rt_state s FOR UPDATE;
  UPDATE rt_policies p SET body = p_body::json, version = p.version + 1, change = v_change, updated_at = t
    WHERE p.tenant = p_tenant AND p.id = p_id RETURNING p.version INTO version;
  outcome := 'replaced';
  IF version IS NULL THEN
    outcome := CASE WHEN v_count >= p_max THEN 'full' ELSE 'created' END;
    IF outcome = 'full' THEN RETURN; END IF;
    INSERT INTO rt_policies (tenant, id, body, change, updated_at) VALUES (p_tenant, p_id, p_body::json, v_change, t);
    version := 1;
  END IF;
  UPDATE rt_state s SET change = v_change, policies = s.policies + CASE WHEN outcome = 'created' THEN 1 ELSE 0 END;
  updated_at := t;
  PERFORM pg_notify('spillway_' || current_schema(), 'rtpol:' || v_change);
END $function$;

CREATE OR REPLACE FUNCTION spillway.rt_policy_remove(p_tenant text, p_id text)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_change bigint;
BEGIN
  SELECT s.change + 1 INTO v_change FROM rt_state s FOR UPDATE;
  DELETE FROM rt_policies p WHERE p.tenant = p_tenant AND p.id = p_id;
  IF NOT FOUND THEN RETURN false; END IF;
  UPDATE rt_state s SET change = v_change, removals = s.removals + 1, policies = s.policies - 1;
  PERFORM pg_notify('spillway_' || current_schema(), 'rtpol:' || v_change);
  RETURN true;
END $function$;

CREATE OR REPLACE FUNCTION spillway.rt_record(p_requests uuid[], p_tenants text[], p_traces text[], p_keys uuid[], p_tasks uuid[], p_decisions text[], p_decision_ms bigint, p_key_ms bigint)
 RETURNS TABLE(outcome smallint, decision json)
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_mine uuid[];
  v_outcomes smallint[] := array_fill(0::smallint, ARRAY[cardinality(p_requests)]);
  v_decisions text[] := p_decisions;
BEGIN
  IF cardinality(array_remove(p_keys, NULL)) > 0 THEN
    -- Within one call the first of a key stands for it. A row that has not expired is locked all the same: it cannot
    -- be swept before it is read below.
    WITH kept AS (
      INSERT INTO rt_keys AS k (key, task, decision, expires_at)
        SELECT DISTINCT ON (u.key) u.key, u.task, u.decision::json, t + p_key_ms * interval '1 ms'
        FROM unnest(p_keys, p_tasks, p_decisions) WITH ORDINALITY u(key, task, decision, i) WHERE u.key IS NOT NULL
        ORDER BY u.key, u.i
        ON CONFLICT (key)
          DO UPDATE SET task = excluded.task, decision = excluded.decision, expires_at = excluded.expires_at
            WHERE k.expires_at <= t
        RETURNING k.key)
    SELECT coalesce(array_agg(x.key), '{}') INTO v_mine FROM kept x;
    -- A statement of its own, so that it sees what others have committed meanwhile.
    SELECT array_agg(CASE WHEN u.key IS NULL OR u.nth = 1 AND u.key = ANY (v_mine) THEN 0 WHEN k.task = u.task THEN 1
        ELSE 2 END ORDER BY u.i),
           array_agg(CASE WHEN u.key IS NULL THEN u.decision ELSE k.decision::text END ORDER BY u.i)
      INTO v_outcomes, v_decisions
      FROM (SELECT r.*, row_number() OVER (PARTITION BY r.key ORDER BY r.i) AS nth
            FROM unnest(p_keys, p_tasks, p_decisions) WITH ORDINALITY r(key, task, decision, i)) u
            LEFT JOIN rt_keys k ON k.key = u.key;
  END IF;
  -- Under the id of a retry stands what it was answered with; of two with one id, the later.
  INSERT INTO rt_decisions AS d (request, tenant, decision, trace_id, decided_at, expires_at)
    SELECT DISTINCT ON (u.request, u.tenant) u.request, u.tenant, u.decision::json, u.trace, t,
      t + p_decision_ms * interval '1 ms'
    FROM unnest(p_requests, p_tenants, p_traces, v_outcomes, v_decisions) WITH ORDINALITY u(request, tenant, trace,
        outcome, decision, i) WHERE u.outcome < 2
    ORDER BY u.request, u.tenant, u.i DESC
    ON CONFLICT (request, tenant) DO UPDATE
      SET decision = excluded.decision, trace_id = excluded.trace_id, decided_at = excluded.decided_at,
        expires_at = excluded.expires_at;
  RETURN QUERY SELECT u.outcome, CASE WHEN u.outcome = 1 THEN u.decision::json END
    FROM unnest(v_outcomes, v_decisions) WITH ORDINALITY u(outcome, decision, i) ORDER BY u.i;
END $function$;

CREATE OR REPLACE FUNCTION spillway.rt_sweep(p_rows integer, OUT decisions integer, OUT keys integer, OUT burials integer)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  IF NOT pg_try_advisory_xact_lock(hashtext('spillway.rt_sweep'), hashtext(current_schema())) THEN RETURN; END IF;
  DELETE FROM rt_decisions d WHERE d.ctid = ANY (ARRAY(
    SELECT x.ctid FROM rt_decisions x WHERE x.expires_at <= t ORDER BY x.expires_at LIMIT p_rows
      FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS decisions = ROW_COUNT;
  DELETE FROM rt_keys d WHERE d.ctid = ANY (ARRAY(
    SELECT x.ctid FROM rt_keys x WHERE x.expires_at <= t ORDER BY x.expires_at LIMIT p_rows FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS keys = ROW_COUNT;
  DELETE FROM rt_burials d WHERE d.ctid = ANY (ARRAY(
    SELECT x.ctid FROM rt_burials x WHERE x.expires_at <= t ORDER BY x.expires_at LIMIT p_rows FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS burials = ROW_COUNT;
END $function$;

CREATE OR REPLACE FUNCTION spillway.settle(p_worker uuid, p_part smallint, s_fence bigint[], s_lane uuid[], s_from bigint[], s_head bigint[], s_left bigint[], s_release boolean[], s_retry_ms bigint[], s_retry_error text[], s_ago_ms bigint[], p_types text[], p_type_counts bigint[], p_gates text[], p_gate_counts bigint[], r_lane uuid[], r_seq bigint[], r_status text[], r_result text[], r_error text[], r_ago_ms bigint[], r_counted boolean[], r_key uuid[], r_answer text[], s_leave text[])
 RETURNS bigint[]
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET jit TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  v_lost bigint[]; v_leave text[]; v_gone bigint; v_release boolean[] := s_release;
  v_paused boolean := pause_guard();
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
  l := lanes_advance(s_lane, s_head, s_left, t);
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
  PERFORM leases_shrink(s_fence, s_lane, v_release);
  FOR i IN 1 .. cardinality(p_types) LOOP
    PERFORM tally(p_worker, p_part, p_types[i], - p_type_counts[i]);
  END LOOP;
  RETURN '{}';
END $function$;

CREATE OR REPLACE FUNCTION spillway.settle_hold(p_worker uuid, p_fences bigint[], p_lanes uuid[], p_keys uuid[])
 RETURNS boolean[]
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.settle_labels(p_labels text[])
 RETURNS text[]
 LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
BEGIN
  PERFORM FROM workers w WHERE w.announced ?| p_labels ORDER BY w.id FOR KEY SHARE;
  RETURN ARRAY(SELECT CASE WHEN EXISTS (SELECT FROM workers w WHERE w.announced ? u.label) THEN u.label END
    FROM unnest(p_labels) WITH ORDINALITY u(label, i) ORDER BY u.i);
END $function$;

CREATE OR REPLACE FUNCTION spillway.space_check()
 RETURNS void
 LANGUAGE plpgsql
 SET work_mem TO '64kB'
 SET temp_tablespaces TO ''
AS $function$
DECLARE
  v_count bigint;
BEGIN
  WITH x AS MATERIALIZED (SELECT repeat('x', 8000) FROM generate_series(1, 128)) SELECT count(*) FROM x INTO v_count;
EXCEPTION WHEN configuration_limit_exceeded THEN
  -- temp_file_limit is below that: nothing can be said of the disk.
  NULL;
END $function$;

CREATE OR REPLACE FUNCTION spillway.stream_abandoned(p_ids uuid[])
 RETURNS TABLE(id uuid, for_ms double precision)
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.stream_append(p_streams uuid[], p_borns bigint[], p_firsts integer[], p_lasts integer[], p_writers text[], p_ends text[], p_texts text, p_levels integer[])
 RETURNS boolean[]
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
#variable_conflict use_column
DECLARE
  v_texts text[] := string_to_array(p_texts, E'\x1d');
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.stream_born(p_ms bigint)
 RETURNS timestamp with time zone
 LANGUAGE sql
 IMMUTABLE PARALLEL SAFE
AS $function$ SELECT to_timestamp(p_ms::float8 / 1000) $function$;

CREATE OR REPLACE FUNCTION spillway.stream_ended(p_ids uuid[], p_ends text[])
 RETURNS void
 LANGUAGE sql
 SET search_path TO 'spillway'
AS $function$
  WITH held AS (
    SELECT s.id, g.ended FROM unnest(p_ids, p_ends) g(id, ended) JOIN streams s ON s.id = g.id AND s.ended IS NULL
      ORDER BY s.id FOR NO KEY UPDATE OF s
  )
  UPDATE streams s SET ended = h.ended, ended_at = clock() FROM held h WHERE s.id = h.id AND s.ended IS NULL
$function$;

CREATE OR REPLACE FUNCTION spillway.stream_entries(p_ids uuid[])
 RETURNS TABLE(id uuid, identity text, format text, thread_id text, log text, direct boolean, born_ms bigint, age_ms double precision, ended text, ended_ms_ago double precision, last integer)
 LANGUAGE sql
 STABLE
 SET search_path TO 'spillway'
AS $function$
  SELECT s.id, s.identity, s.format, s.thread_id, s.log, s.direct, (extract(epoch FROM s.born_at) * 1000)::bigint,
    extract(epoch FROM c.t - s.born_at)::float8 * 1000, s.ended, extract(epoch FROM c.t - s.ended_at)::float8 * 1000,
      coalesce(h.last, 0)
  FROM clock() c(t), unnest(p_ids) u(id) JOIN streams s ON s.id = u.id
  LEFT JOIN LATERAL (
    SELECT x.last FROM stream_chunks x WHERE s.log = 'postgres' AND x.stream = s.id AND x.born_at = s.born_at
      ORDER BY x.first DESC LIMIT 1
  ) h ON true
$function$;

CREATE OR REPLACE FUNCTION spillway.stream_open(p_ids uuid[], p_identities text[], p_formats text[], p_threads text[], p_logs text[], p_directs boolean[], p_watchers uuid[], p_ms_ago bigint[])
 RETURNS TABLE(created boolean, id uuid, identity text, format text, thread_id text, log text, direct boolean, born_ms bigint, age_ms double precision, ended text, ended_ms_ago double precision, last integer)
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.stream_orphans(p_every_ms bigint, p_grace_ms bigint, p_most integer)
 RETURNS TABLE(id uuid, identity text, format text, thread_id text, log text, direct boolean, born_ms bigint, age_ms double precision, ended text, ended_ms_ago double precision, last integer)
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET jit TO 'off'
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.stream_sweep_ahead(p_kept_ms bigint)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.stream_sweep_behind(p_kept_ms bigint, p_rows integer)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.stream_sweep_entries(p_retention_ms bigint, p_longest_ms bigint, p_rows integer)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.stream_sweep_lock()
 RETURNS boolean
 LANGUAGE sql
 SET search_path TO 'spillway'
AS $function$
  SELECT set_config('lock_timeout', '500ms', true) IS NOT NULL
    AND pg_try_advisory_xact_lock(hashtext('spillway.streams'), hashtext(current_schema()))
$function$;

CREATE OR REPLACE FUNCTION spillway.stream_watch(p_ids uuid[], p_watchers uuid[], p_reads boolean[])
 RETURNS boolean[]
 LANGUAGE sql
 SET search_path TO 'spillway'
AS $function$
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
$function$;

CREATE OR REPLACE FUNCTION spillway.stuck_operations(p_times integer)
 RETURNS TABLE(type text, id uuid, queue text, partition text, seconds double precision)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'spillway'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
BEGIN
  RETURN QUERY
    SELECT DISTINCT ON (o.type) o.type, o.id, n.queue, n.partition,
      extract(epoch FROM t - o.started_at)::double precision
    FROM leases l, unnest(l.lanes, l.uptos) z(lane, upto), ops o, lanes n
    WHERE o.lane = z.lane AND o.seq <= z.upto AND n.id = z.lane
      AND o.started_at < t - p_times * o.timeout_ms::bigint * interval '1 ms'
    ORDER BY o.type, o.started_at;
END $function$;

CREATE OR REPLACE FUNCTION spillway.sweep_history(p_retention_ms bigint, p_rows integer)
 RETURNS TABLE(partitions_made integer, partitions_dropped integer, history integer)
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.sweep_rest(p_rest_ms bigint)
 RETURNS void
 LANGUAGE sql
 SET search_path TO 'spillway'
AS $function$
  UPDATE sweep_turn SET next_at = clock_timestamp() + p_rest_ms * interval '1 ms'
$function$;

CREATE OR REPLACE FUNCTION spillway.sweep_rows(p_rows integer, p_from timestamp with time zone[] DEFAULT '{-infinity,-infinity,-infinity}'::timestamp with time zone[], OUT keys integer, OUT rate_rows integer, OUT lanes integer, OUT cancels integer, OUT is_full boolean, OUT upto timestamp with time zone[])
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.sweep_take(p_hold_ms bigint)
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
BEGIN
  UPDATE sweep_turn x SET next_at = clock_timestamp() + p_hold_ms * interval '1 ms'
    WHERE x.next_at <= clock_timestamp();
  RETURN CASE WHEN FOUND THEN 0
    ELSE (SELECT greatest(1, ceil(extract(epoch FROM x.next_at - clock_timestamp()) * 1000)) FROM sweep_turn x) END;
END $function$;

CREATE OR REPLACE FUNCTION spillway.tally(p_worker uuid, p_part smallint, p_type text, p_n bigint)
 RETURNS void
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.tally_accepted(p_worker uuid, p_part smallint, p_types text[], p_verdicts text[], p_n bigint)
 RETURNS void
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.verdicts_decide(p_apply boolean, p_may_lease boolean, p_paused boolean, p_backlog_ms bigint, p_lane integer[], p_rn bigint[], p_priority smallint[], p_stamp bigint[], p_lead bigint[], p_delay_ms bigint[], p_reason text[], p_pace_ms real[], p_decided text[], p_counts bigint[], p_tails bigint[], p_depths bigint[], p_running integer[], p_paces real[], p_blocked bigint[], OUT verdicts text[], OUT seqs bigint[], OUT places bigint[], OUT waits_ms bigint[], OUT stamps bigint[], OUT reasons text[], OUT starts_lanes boolean, OUT accepted bigint)
 RETURNS record
 LANGUAGE plpgsql
AS $function$
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
END $function$;

CREATE OR REPLACE FUNCTION spillway.worker_forget(p_worker uuid)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'spillway'
AS $function$
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
END $function$;
