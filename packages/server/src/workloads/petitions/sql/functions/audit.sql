-- Checks what must hold between transactions. Returns no row if all of it does.

-- What does not hold, for tests and for doctors.
CREATE OR REPLACE FUNCTION petitions_audit() RETURNS TABLE (fault text)
  LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT 'petitions in ' || s.state || ': ' || s.n || ' counted, ' || c.n || ' there' FROM petition_states s,
    LATERAL (SELECT count(*) AS n FROM petitions p WHERE p.state = s.state) c WHERE s.n <> c.n
  UNION ALL
  SELECT 'the gate holds ' || g.held || ' places, for ' || s.n || ' received and ' || o.n || ' queued'
    FROM gates g, petition_states s,
    LATERAL (SELECT count(*) AS n FROM ops x WHERE x.gate = 'petitions') o
    WHERE g.name = 'petitions' AND s.state = 'RECEIVED' AND g.held <> s.n + o.n
  UNION ALL
  SELECT 'petition ' || p.id || ' has no event of its receipt' FROM petitions p
    WHERE p.id NOT IN (SELECT (l.payload::json->>'petition_id')::uuid FROM ledger l
        WHERE l.type = 'petition.submission.received')
$$;
