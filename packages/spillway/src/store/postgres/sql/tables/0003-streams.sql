-- Streams: the output of operations while they run.
--
--   opened ──first record──► running ──record with an end──► ended ──retention──► expired (swept)
--
-- A record is one row: the chunks first..last. Two writers collide on (stream, first). Rows are never changed. They go
-- with their whole partition, which is why every row of a stream carries the time at which the stream was opened.

CREATE TABLE streams (
  id           uuid PRIMARY KEY,             -- the operation's
  identity     text NOT NULL,
  format       text NOT NULL CHECK (format IN ('openai', 'native')),
  thread_id    text NOT NULL,
  log          text NOT NULL CHECK (log IN ('postgres', 'redis')),
  -- callers know it in whole milliseconds
  born_at      timestamptz NOT NULL CHECK (born_at = date_trunc('milliseconds', born_at)),
  direct       boolean NOT NULL,             -- begun at once, where it was accepted; else it was queued
  watcher      uuid,                         -- the process whose client reads it
  unwatched_at timestamptz,                  -- since when nobody does
  ended        text CHECK (ended IN ('done', 'error', 'cancelled', 'unbegun')),
  ended_at     timestamptz,
  CHECK ((watcher IS NULL) = (unwatched_at IS NOT NULL)),
  CHECK ((ended IS NULL) = (ended_at IS NULL))
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX streams_born ON streams (born_at);
CREATE INDEX streams_ended ON streams (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX streams_open ON streams (born_at) WHERE ended_at IS NULL;

-- When a process looks next for streams that nobody will end. In real time, which no test moves.
CREATE TABLE stream_look (
  one     boolean PRIMARY KEY DEFAULT true CHECK (one),
  next_at timestamptz NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE stream_chunks (
  stream  uuid NOT NULL,
  born_at timestamptz NOT NULL,              -- of the stream
  first   int NOT NULL CHECK (first >= 1),
  last    int NOT NULL CHECK (last >= first),
  writer  text NOT NULL,
  chunks  text NOT NULL,                     -- with E'\x1e' between them, which has no place in JSON
  ended   text CHECK (ended IN ('done', 'error', 'cancelled', 'unbegun')), -- its last chunk is the stream's end
  PRIMARY KEY (stream, first, born_at)
) PARTITION BY RANGE (born_at);

-- Catches what no partition covers, so that appending never fails for want of one.
CREATE TABLE stream_chunks_rest PARTITION OF stream_chunks DEFAULT;

CREATE TABLE stream_spans (
  name    text PRIMARY KEY,
  from_at timestamptz NOT NULL,
  to_at   timestamptz NOT NULL
);
