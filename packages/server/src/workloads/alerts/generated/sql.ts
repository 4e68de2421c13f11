/** Made from the .sql files by scripts/generate-sql.mjs; not meant to be edited. */
export const alertsSql = {
  name: 'alerts',
  tables: [
    {
      id: '0001-alerts',
      sql: `-- Alerts.
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
`,
    },
  ],
  functions: [
    {
      name: 'report',
      sql: `-- Records a change of an alert's status, and limits how many wait to be delivered.

-- Returns when it happened, or NULL: nothing has changed.
CREATE OR REPLACE FUNCTION alert_report(
   p_key uuid, p_id uuid, p_name text, p_labels json, p_status text, p_severity text, p_message text,
  p_annotations json, p_reporter uuid, p_hold_ms bigint, p_delivery text
) RETURNS timestamptz
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := date_trunc('milliseconds', clock());
  v_status text; v_seq bigint;
BEGIN
  IF p_status = 'firing' THEN
    -- The first report; a concurrent one waits here for this one's commit.
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
END $$;

-- Limits how many wait to be delivered. Removes first the oldest alert that is over, together with its end: the
-- receiver never learns of it. Then an end with the beginning that followed it, which leaves the receiver with the
-- true state; then single ones, a beginning before an end. Never one that the receiver may have seen.
CREATE OR REPLACE FUNCTION alert_shed(p_most int) RETURNS TABLE (id uuid, name text, status text, operation uuid)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
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
    -- Its delivery may start at this moment: only after locking both is this known.
    PERFORM FROM alerts a WHERE a.seq = ANY (v_seqs) ORDER BY a.seq FOR UPDATE;
    CONTINUE WHEN EXISTS (SELECT FROM alerts a
        WHERE a.seq = ANY (v_seqs) AND (a.attempts > 0 OR a.delivery <> 'waiting'));
    RETURN QUERY UPDATE alerts a SET delivery = 'dropped' WHERE a.seq = ANY (v_seqs)
      RETURNING a.id, a.name, a.status, a.operation;
  END LOOP;
END $$;
`,
    },
    {
      name: 'stuck',
      sql: `-- Finds operations that run much longer than their timeout.

-- The longest-running operation of each type that has been running for more than p_times its timeout. Looks up leased
-- operations by index, however many wait: marking one cuts its lease down to it, so that a lane has few rows to
-- examine.
CREATE OR REPLACE FUNCTION stuck_operations(
  p_times int
) RETURNS TABLE (type text, id uuid, queue text, partition text, seconds double precision)
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_hashjoin = off SET enable_mergejoin = off
  SET enable_seqscan = off SET enable_bitmapscan = off AS $$
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
END $$;
`,
    },
    {
      name: 'sweep',
      sql: `-- Removes old alerts, and closes those that nothing delivers any more.

-- Removes old alerts and those beyond the newest p_rows, and closes alerts without a delivery: its operation died with
-- its process, or was cancelled. NULL: another process sweeps.
CREATE OR REPLACE FUNCTION alert_sweep(p_days int, p_rows int, p_most int) RETURNS int
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
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
END $$;
`,
    },
  ],
}
