-- question: how many heads of each model nearly close, over a sweep of thresholds
-- param thresholds DOUBLE[] 0..1 = [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99]: closures at or above which a head is strong
-- param models VARCHAR[] of models.model = NULL: models to keep; all where NULL
-- param operator VARCHAR of operators.operator = NULL: raw, folded or scaled; each on its own rows where NULL
SELECT
    model,
    operator,
    stack,
    sweep.threshold,
    count(closure) AS defined,
    count(*) FILTER (closure >= sweep.threshold) AS strong,
    count(*) FILTER (closure >= sweep.threshold) / nullif(count(closure), 0) AS rate,
    count(*) FILTER (closure >= sweep.threshold AND alpha < 0) AS strong_negative,
    count(DISTINCT layer) FILTER (closure >= sweep.threshold) AS layers_with_one
FROM heads
CROSS JOIN (SELECT unnest(list_distinct($thresholds::DOUBLE[])) AS threshold) AS sweep
WHERE ($models IS NULL OR list_contains($models, model)) AND ($operator IS NULL OR operator = $operator)
GROUP BY model, operator, stack, sweep.threshold
ORDER BY model, operator DESC, stack, sweep.threshold;
