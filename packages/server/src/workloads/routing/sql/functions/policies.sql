-- Creates, replaces and removes policies, and notifies the other processes.

-- 'created', 'replaced', or 'full': there are as many as may be.
CREATE OR REPLACE FUNCTION rt_policy_put(
  p_tenant text, p_id text, p_body text, p_max int,
  OUT outcome text, OUT version int, OUT updated_at timestamptz
)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
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
END $$;

CREATE OR REPLACE FUNCTION rt_policy_remove(p_tenant text, p_id text) RETURNS boolean
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
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
END $$;
