-- question: how nearly the heads of each model are scaled isometries, strong heads apart from the others
-- param threshold DOUBLE 0..1 = 0.9: closure at or above which a head is strong
-- param models VARCHAR[] of models.model = NULL: models to keep; all where NULL
-- param operator VARCHAR of operators.operator = NULL: raw, folded or scaled; each on its own rows where NULL
SELECT
    model,
    operator,
    stack,
    count(isometry) AS heads,
    median(isometry) AS isometry,
    quantile_cont(isometry, 0.1) AS isometry_q10,
    quantile_cont(isometry, 0.9) AS isometry_q90,
    median(isometry) FILTER (closure >= $threshold) AS isometry_of_strong,
    median(isometry) FILTER (closure < $threshold) AS isometry_of_others,
    median(participation) AS participation,
    median(stable_rank) AS stable_rank,
    median(condition) AS condition,
    CASE
        WHEN min(isometry) < max(isometry) AND min(closure) < max(closure)
        THEN corr(isometry, closure ORDER BY layer, head)
    END AS correlation_with_closure
FROM heads
WHERE ($models IS NULL OR list_contains($models, model)) AND ($operator IS NULL OR operator = $operator)
GROUP BY model, operator, stack
ORDER BY model, operator DESC, stack;
