-- The gates that count: capacity and rate, for the items of a flush that are not decided yet.
--
-- gates_take is a step of accept. What is asked for is added at once in one statement per kind of gate. Only if that
-- does not fit, ration walks the items one by one and the rest is taken back.
CREATE OR REPLACE FUNCTION gates_take(
  p_gates text[], p_rate_key uuid[], p_rate_asked int[], p_rate_limit int[], p_rate_minutes int[],
  p_rate_keep int[], p_rate_ix int[], p_rate_item int[], p_decided text[], p_items int, p_at timestamptz,
  OUT verdicts text[], OUT tiers int[], OUT rates_left bigint[], OUT rates_reset_ms bigint[], OUT at_ms bigint
)
  LANGUAGE plpgsql AS $$
DECLARE
  v_tight boolean := false; v_odd boolean := false;
  v_names text[]; v_gates_left bigint[]; v_gates_asked bigint[]; v_gates_gave bigint[];
  v_rates_left int[]; v_rates_asked int[]; v_rates_gave int[]; v_waits_ms bigint[];
  r record;
BEGIN
  verdicts := p_decided;
  IF cardinality(p_rate_key) > 0 THEN
    v_rates_asked := CASE WHEN p_decided IS NULL THEN p_rate_asked
      ELSE rates_asked(p_rate_ix, p_rate_item, p_decided, cardinality(p_rate_key)) END;
    r := rates_take(p_rate_key, v_rates_asked, p_rate_limit, p_rate_minutes, p_rate_keep, p_at);
    v_rates_left := r.left_now; v_waits_ms := r.waits_ms; v_tight := r.is_tight; v_odd := r.is_odd;
  END IF;
  IF cardinality(p_gates) > 0 THEN
    r := capacity_take(p_gates, p_decided);
    v_names := r.names; v_gates_left := r.left_now; v_gates_asked := r.asked; v_tight := v_tight OR r.is_tight;
  END IF;
  v_rates_gave := v_rates_asked; v_gates_gave := v_gates_asked;
  IF v_tight THEN
    r := ration(p_gates, v_names, v_gates_left, p_rate_ix, p_rate_item, v_rates_left, p_decided, p_items);
    verdicts := r.verdicts; v_gates_gave := r.gates_gave; v_rates_gave := r.rates_gave;
    PERFORM rates_return(p_rate_key, v_rates_asked, v_rates_gave);
  END IF;
  IF v_names IS NOT NULL THEN PERFORM capacity_hold(v_names, v_gates_gave, p_at); END IF;
  IF v_rates_left IS NULL THEN RETURN; END IF;
  IF v_tight OR v_odd THEN v_waits_ms := rates_waits(p_rate_key, p_rate_limit, p_rate_minutes, p_at); END IF;
  r := rates_status(p_rate_ix, p_rate_item, p_items, verdicts, v_rates_left, v_rates_gave, v_waits_ms);
  tiers := r.tiers; rates_left := r.rates_left; rates_reset_ms := r.rates_reset_ms;
  at_ms := floor(extract(epoch FROM p_at) * 1000);
END $$;

-- Item by item, in order. Capacity before rate; a refused item takes from neither.
CREATE OR REPLACE FUNCTION ration(
  p_gates text[], p_names text[], p_gates_left bigint[], p_rate_ix int[], p_rate_item int[], p_rates_left int[],
  p_decided text[], p_items int,
  OUT verdicts text[], OUT gates_gave bigint[], OUT rates_gave int[]
)
  LANGUAGE plpgsql AS $$
DECLARE
  v_gate int; v_tiers int[]; v_fits boolean; v_tier int;
BEGIN
  verdicts := coalesce(p_decided, array_fill(NULL::text, ARRAY[p_items]));
  gates_gave := array_fill(0::bigint, ARRAY[coalesce(cardinality(p_names), 0)]);
  rates_gave := array_fill(0, ARRAY[coalesce(cardinality(p_rates_left), 0)]);
  FOR v_item IN 1 .. p_items LOOP
    CONTINUE WHEN verdicts[v_item] IS NOT NULL;
    v_gate := CASE WHEN p_gates[v_item] IS NOT NULL THEN array_position(p_names, p_gates[v_item]) END;
    IF v_gate IS NOT NULL AND p_gates_left[v_gate] - gates_gave[v_gate] <= 0 THEN
      verdicts[v_item] := 'capacity_full';
      CONTINUE;
    END IF;
    v_tiers := ARRAY(SELECT u.ix FROM unnest(p_rate_ix, p_rate_item) WITH ORDINALITY u(ix, item, i)
      WHERE coalesce(u.item, u.i) = v_item);
    v_fits := true;
    FOREACH v_tier IN ARRAY v_tiers LOOP
      v_fits := v_fits AND p_rates_left[v_tier] - rates_gave[v_tier] > 0;
    END LOOP;
    IF NOT v_fits THEN
      verdicts[v_item] := 'rate_limited';
      CONTINUE;
    END IF;
    IF v_gate IS NOT NULL THEN gates_gave[v_gate] := gates_gave[v_gate] + 1; END IF;
    FOREACH v_tier IN ARRAY v_tiers LOOP
      rates_gave[v_tier] := rates_gave[v_tier] + 1;
    END LOOP;
  END LOOP;
END $$;
