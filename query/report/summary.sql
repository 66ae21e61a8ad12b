SELECT
    closure.model,
    closure.operator,
    closure.stack,
    layers.layers,
    closure.heads,
    layers.d_head,
    closure.defined,
    closure.strong,
    closure.rate,
    closure.median,
    closure.maximum,
    scramble.null_median,
    scramble.win_rate,
    capacity.median AS capacity_median,
    mismatch.maximum AS mismatch_maximum,
    algebra.right_median
FROM closure_by_model($threshold) AS closure
JOIN (
    SELECT model, operator, stack, count(DISTINCT layer) AS layers,
        CASE WHEN min(d_head) = max(d_head) THEN min(d_head)::VARCHAR
             ELSE min(d_head) || ' to ' || max(d_head) END AS d_head
    FROM heads GROUP BY ALL
) AS layers USING (model, operator, stack)
LEFT JOIN (FROM null_by_model() WHERE kind = 'scramble') AS scramble USING (model, operator, stack)
LEFT JOIN (FROM capacity_by_model($threshold) WHERE method = 'assignment') AS capacity USING (model, operator, stack)
LEFT JOIN mismatch_by_model($threshold) AS mismatch USING (model, operator, stack)
LEFT JOIN (FROM algebra_by_model($threshold) WHERE pairing = 'same group') AS algebra USING (model, operator, stack)
WHERE list_contains($models, closure.model) AND ($operator IS NULL OR closure.operator = $operator)
ORDER BY closure.model, closure.operator DESC, closure.stack
