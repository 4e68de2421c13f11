-- Halting waits for every flush that has passed the check in accept: after halt_set returns, nothing more is accepted.

-- True when it was not halted before. Waits for what is being accepted: see accept.
CREATE OR REPLACE FUNCTION halt_set(p_scope text, p_reason text) RETURNS boolean
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtext('spillway.halts'), hashtext(current_schema()));
  INSERT INTO halts (scope, reason, since) VALUES (p_scope, p_reason, clock()) ON CONFLICT (scope) DO NOTHING;
  RETURN FOUND;
END $$;
