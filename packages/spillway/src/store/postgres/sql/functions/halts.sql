-- Halts: behind a halt nothing is accepted. halt_set waits for every flush that has passed halts_check, so nothing
-- more is accepted after it returns.

-- A step of accept. Decides the items whose scope is halted.
CREATE OR REPLACE FUNCTION halts_check(p_scopes text[], p_decided text[]) RETURNS text[]
  LANGUAGE plpgsql AS $$
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
END $$;

-- True if it was not halted before.
CREATE OR REPLACE FUNCTION halt_set(p_scope text, p_reason text) RETURNS boolean
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtext('spillway.halts'), hashtext(current_schema()));
  INSERT INTO halts (scope, reason, since) VALUES (p_scope, p_reason, clock()) ON CONFLICT (scope) DO NOTHING;
  RETURN FOUND;
END $$;
