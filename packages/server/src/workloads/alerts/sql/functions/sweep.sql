-- Removes old alerts, and closes those that nothing delivers any more.

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
