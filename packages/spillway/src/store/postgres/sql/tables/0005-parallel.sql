-- Parallel operations: each is a lane of its own, whose id is the operation's. Such a lane holds one operation in its
-- life, and goes with it, in the same transaction: there is no empty one for the sweep to find.
ALTER TABLE lanes ADD COLUMN alone boolean NOT NULL DEFAULT false;
