-- Removes expired rows: at most p_rows of each table. Null: another process is sweeping.
CREATE OR REPLACE FUNCTION rt_sweep(p_rows int, OUT decisions int, OUT keys int, OUT burials int)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
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
END $$;
