-- Operations that may not start after a time.
--
-- Who claims one too late ends it without running it; what nobody claims (paused, waiting for its turn or for a retry)
-- is ended by a task of every heartbeat, which finds it by the index. It becomes history, with the code: there is no
-- dead letter, because running it again would be too late again.
ALTER TABLE ops ADD COLUMN expires_at timestamptz;
CREATE INDEX ops_expires ON ops (expires_at) WHERE expires_at IS NOT NULL;

-- NOT VALID: no old row can violate it, and the table need not be read.
ALTER TABLE history ADD COLUMN code text, DROP CONSTRAINT IF EXISTS history_status_check;
ALTER TABLE history ADD CONSTRAINT history_status_check
  CHECK (status IN ('completed', 'cancelled', 'failed')) NOT VALID;
