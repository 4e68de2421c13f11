-- Recurring work. The processes know what a schedule means and when it is due next; the row says what was handled. A
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
