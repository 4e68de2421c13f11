-- Recurring work. The processes know what a schedule means and when it is due next; the row says what was handled. The
-- process that finds a due row locks it, queues the operation and moves next_at in one transaction: once per due time,
-- however many processes there are and whenever they die. The store's clock decides what is due.
--
-- The text of the process that registered last is in the row. A process with another text (an older release, during a
-- deploy) leaves the row alone.

-- p_next: computed from the store's clock, and after the last due time that was handled, so that a due time which both
-- texts have is handled once. What is due already stays due.
CREATE OR REPLACE FUNCTION schedule_put(
  p_name text, p_cron text, p_timezone text, p_type text, p_next timestamptz
) RETURNS void
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  INSERT INTO schedules AS s (name, cron, timezone, type, next_at, seen_at)
    VALUES (p_name, p_cron, p_timezone, p_type, p_next, clock())
  ON CONFLICT (name) DO UPDATE SET
    cron = excluded.cron, timezone = excluded.timezone, type = excluded.type, seen_at = excluded.seen_at,
    next_at = CASE WHEN (s.cron = excluded.cron AND s.timezone = excluded.timezone) OR s.next_at <= clock()
      THEN s.next_at ELSE excluded.next_at END
$$;

-- The row, locked, if it is due and no other process has it.
CREATE OR REPLACE FUNCTION schedule_take(p_name text, p_cron text, p_timezone text)
RETURNS TABLE (next_ms double precision, now_ms double precision)
  LANGUAGE sql SET search_path FROM CURRENT AS $$
  SELECT extract(epoch FROM s.next_at) * 1000, extract(epoch FROM clock()) * 1000 FROM schedules s
    WHERE s.name = p_name AND s.cron = p_cron AND s.timezone = p_timezone AND s.next_at <= clock()
    FOR UPDATE SKIP LOCKED
$$;

-- Says that these are still defined, and removes those that no process has defined for p_keep_ms.
CREATE OR REPLACE FUNCTION schedules_seen(p_names text[], p_keep_ms bigint) RETURNS bigint
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  v_removed bigint;
BEGIN
  UPDATE schedules s SET seen_at = clock() WHERE s.name = ANY (p_names);
  DELETE FROM schedules s WHERE s.seen_at < clock() - p_keep_ms * interval '1 ms';
  GET DIAGNOSTICS v_removed = ROW_COUNT;
  RETURN v_removed;
END $$;
