-- The one clock: leases, windows, delays and the order in time read it.
--
-- Tests and benchmarks replace it, so it is created only where it is missing: installing the functions again must not
-- undo a replacement.

DO $do$
BEGIN
  IF to_regprocedure(quote_ident(current_schema()) || '.clock()') IS NULL THEN
    CREATE FUNCTION clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$ SELECT clock_timestamp() $$;
  END IF;
END $do$;
