-- admit: the gates that count (halt and rate) without an operation. One call per flush, in its own transaction: the
-- same steps as in accept, in the same lock order, so a rate is exact whether an operation or an admission takes it.
--
-- Verdicts: halted, rate_limited; NULL is admitted. Returned as in accept: one row of arrays, an element per item.
CREATE OR REPLACE FUNCTION admit(
  p_items int,
  -- Empty: no item has one.
  p_halts text[],
  -- As in accept.
  p_rate_key uuid[], p_rate_asked int[], p_rate_limit int[], p_rate_minutes int[], p_rate_keep int[],
  p_rate_ix int[], p_rate_item int[],
  OUT verdicts text[], OUT tiers int[], OUT rates_left bigint[], OUT rates_reset_ms bigint[], OUT at_ms bigint
)
  LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
  g record;
BEGIN
  IF cardinality(p_halts) > 0 THEN verdicts := halts_check(p_halts, NULL); END IF;
  IF cardinality(p_rate_key) = 0 THEN RETURN; END IF;
  g := gates_take('{}', p_rate_key, p_rate_asked, p_rate_limit, p_rate_minutes, p_rate_keep, p_rate_ix, p_rate_item,
    verdicts, p_items, clock());
  verdicts := g.verdicts;
  tiers := g.tiers; rates_left := g.rates_left; rates_reset_ms := g.rates_reset_ms; at_ms := g.at_ms;
END $$;
