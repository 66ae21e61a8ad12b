-- question: strong heads that beat their scrambles and whose capacity is unusual for their model
-- param threshold DOUBLE 0..1 = 0.9: closure at or above which a head is strong
-- param p DOUBLE 0..1 = 0.01: largest share of scrambles at or above the head's closure
-- param deviations DOUBLE 0.. = 3: distance of the capacity from the model's median, in scaled median deviations
-- param models VARCHAR[] of models.model = NULL: models to keep; all where NULL
-- param operator VARCHAR of operators.operator = NULL: raw, folded or scaled; each on its own rows where NULL
WITH usual AS (
    SELECT model, operator, stack, median(closure) AS middle, 1.4826 * mad(closure) AS spread
    FROM capacities
    WHERE method = 'assignment'
    GROUP BY model, operator, stack
)
SELECT
    model,
    operator,
    stack,
    heads.label,
    heads.layer,
    heads.head,
    heads.closure,
    heads.alpha,
    nulls.p,
    nulls.p_tail,
    capacities.closure AS capacity,
    usual.middle AS capacity_median,
    (capacities.closure - usual.middle) / nullif(usual.spread, 0) AS capacity_deviations,
    capacities.attainment
FROM heads
JOIN nulls USING (model, operator, stack, layer, head)
JOIN capacities USING (model, operator, stack, layer, head)
JOIN usual USING (model, operator, stack)
WHERE ($models IS NULL OR list_contains($models, model)) AND ($operator IS NULL OR operator = $operator)
    AND heads.closure >= $threshold
    AND nulls.kind = 'scramble'
    AND nulls.p <= $p
    AND capacities.method = 'assignment'
    AND abs(capacities.closure - usual.middle) >= $deviations * usual.spread
ORDER BY model, operator DESC, stack, abs(capacities.closure - usual.middle) / nullif(usual.spread, 0) DESC, heads.layer, heads.head;
