-- Records a change of an alert's status, and limits how many wait to be delivered.

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
