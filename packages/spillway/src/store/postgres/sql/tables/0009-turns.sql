-- Turns: at most so many operations of one key run at a time, over all instances, and they start in order.
--
-- Each operation with a key is a lane of its own (0005-parallel.sql). Its lane holds a permit of the key while it is
-- ready or leased, and waits for one as a parked lane with the reason 'turn'. Whatever parks or removes a lane gives
-- its permit back and, in the same transaction, passes it on to the first one that waits (functions/turns.sql). A lane
-- keeps its turn for life: one that comes back from a retry, a delay or a pause waits again, before those accepted
-- later.
--
-- Invariant, audited by audit(): running is the number of the key's lanes that are ready or leased, lanes the number of
-- all its lanes, and none waits while running < most. Only a limit that was lowered leaves running above it.
--
-- Lock order: between lanes and ops, by key. Who holds the row may move the lanes that wait for a turn.
CREATE TABLE turns (
  key       uuid PRIMARY KEY,                -- of queue and partition, as a lane's id is
  queue     text NOT NULL,
  partition text NOT NULL,
  most      int NOT NULL CHECK (most >= 1),  -- as the last acceptance said
  running   int NOT NULL DEFAULT 0,
  lanes     bigint NOT NULL,
  CHECK (running BETWEEN 0 AND lanes)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);

-- A number that is taken in the accepting transaction: what was accepted before another was submitted is before it.
CREATE SEQUENCE turn_numbers;

ALTER TABLE lanes ADD COLUMN key uuid, ADD COLUMN turn bigint;

ALTER TABLE parked ADD COLUMN key uuid, ADD COLUMN turn bigint,
  DROP CONSTRAINT parked_reason_check,
  ADD CONSTRAINT parked_reason_check CHECK (reason IN ('delay', 'retry', 'pause', 'turn'));
CREATE INDEX parked_turn ON parked (key, turn) WHERE reason = 'turn';

-- For redriving, when nothing of the key may be left.
ALTER TABLE dead_letters ADD COLUMN key uuid, ADD COLUMN most int;
