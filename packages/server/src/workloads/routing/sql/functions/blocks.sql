-- Creates, replaces and removes blocks.

-- 'created', 'replaced', 'exists' (and it may not be replaced), or 'full'.
CREATE OR REPLACE FUNCTION rt_block_put(
  p_type text, p_version text, p_body text, p_replace boolean, p_max int,
  OUT outcome text, OUT created_at timestamptz, OUT updated_at timestamptz
)
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
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
END $$;

CREATE OR REPLACE FUNCTION rt_block_remove(p_type text, p_version text) RETURNS boolean
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  PERFORM FROM rt_state s FOR UPDATE;
  DELETE FROM rt_blocks b WHERE b.type = p_type AND b.version = p_version;
  IF NOT FOUND THEN RETURN false; END IF;
  UPDATE rt_state s SET blocks = s.blocks - 1;
  RETURN true;
END $$;
