-- Puts a lane with operations where it belongs: ready, or parked by a delay or a pause.

-- Puts a lane that has operations where it belongs. The caller holds its lock, and it is nowhere else.
CREATE OR REPLACE FUNCTION lane_requeue(p_lane uuid) RETURNS void
  LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock();
  o record;
BEGIN
  SELECT x.priority, x.stamp, x.type, x.not_before, l.head, l.depth, l.careful > l.head AS careful, l.queue,
    l.partition INTO o FROM lanes l, ops x
    WHERE l.id = p_lane AND x.lane = l.id AND x.seq > l.head ORDER BY x.seq LIMIT 1;
  IF NOT FOUND THEN
    RETURN;
  ELSIF lane_paused(p_lane) THEN
    INSERT INTO parked (lane, until, reason) VALUES (p_lane, 'infinity', 'pause');
  ELSIF o.not_before > t THEN
    INSERT INTO parked (lane, until, reason) VALUES (p_lane, o.not_before, 'delay');
  ELSE
    INSERT INTO ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
      VALUES (p_lane, o.priority, o.stamp, o.type, o.head, o.depth, o.careful, o.queue, o.partition);
  END IF;
END $$;
