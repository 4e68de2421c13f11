-- Records overflow in the ledger, in the commit that causes it: a submission, a transition or a new threshold. A
-- deferred trigger, because the ledger's lock comes last.

-- Appends the event at the end of the transaction.
CREATE OR REPLACE FUNCTION petition_overflow() RETURNS trigger
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  PERFORM ledger_append(ARRAY['petition.queue.overflow.' || CASE WHEN NEW.overflowing THEN 'started'
        ELSE 'ended' END], ARRAY['system'], ARRAY[''],
    ARRAY['{"depth":' || NEW.held || ',"resume_below":' || NEW.resume_below || ',"threshold":' || NEW.full_at || '}']);
  PERFORM pg_notify('spillway_' || current_schema(), 'petition_overflow:');
  RETURN NULL;
END $$;

DO $do$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = 'gates'::regclass AND g.tgname = 'petition_overflow') THEN
    CREATE CONSTRAINT TRIGGER petition_overflow AFTER UPDATE OF overflowing ON gates
      DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
      WHEN (NEW.name = 'petitions' AND OLD.overflowing IS DISTINCT FROM NEW.overflowing)
      EXECUTE FUNCTION petition_overflow();
  END IF;
END $do$;

-- The overflows that were witnessed behind p_after, oldest first; p_after NULL: since this process was enlisted,
-- which is before it registers the gate, and so may end an overflow itself.
CREATE OR REPLACE FUNCTION petition_overflows(
  p_worker uuid, p_after bigint, p_rows int,
  OUT after bigint, OUT overflows json
)
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
  after := coalesce(p_after, (SELECT max(l.seq) FROM ledger l
        WHERE l.type IN ('petition.queue.overflow.started', 'petition.queue.overflow.ended')
    AND l.at < coalesce((SELECT date_trunc('milliseconds', w.started_at) FROM workers w
          WHERE w.id = p_worker), clock())), 0);
  SELECT coalesce(max(x.seq), after), json_agg(json_build_object('seq', x.seq, 'type', x.type, 'payload', x.payload)
      ORDER BY x.seq) INTO after, overflows FROM (
    SELECT l.seq, l.type, l.payload FROM ledger l
      WHERE l.type IN ('petition.queue.overflow.started', 'petition.queue.overflow.ended') AND l.seq > after
    ORDER BY l.seq LIMIT p_rows) x;
END $$;
