-- question: how far heads stay below the closure that their singular values and angles allow, by model
-- param method VARCHAR of capacities.method = NULL: assignment or riemannian; each on its own rows where NULL
-- param threshold DOUBLE 0..1 = 0.9: closure at or above which a head is strong
-- param models VARCHAR[] of models.model = NULL: models to keep; all where NULL
-- param operator VARCHAR of operators.operator = NULL: raw, folded or scaled; each on its own rows where NULL
SELECT
    model,
    operator,
    stack,
    method,
    count(attainment) AS defined,
    median(heads.closure) AS closure,
    median(capacities.closure) AS capacity,
    median(capacities.closure - heads.closure) AS gap,
    quantile_cont(capacities.closure - heads.closure, 0.1) AS gap_q10,
    quantile_cont(capacities.closure - heads.closure, 0.9) AS gap_q90,
    median(attainment) AS attainment,
    arg_min(label, attainment) AS least_attaining,
    arg_max(label, attainment) AS most_attaining,
    count(*) FILTER (capacities.closure >= $threshold AND heads.closure < $threshold) AS could_be_strong
FROM capacities
JOIN heads USING (model, operator, stack, layer, head)
WHERE ($models IS NULL OR list_contains($models, model)) AND ($operator IS NULL OR operator = $operator)
    AND ($method IS NULL OR method = $method)
GROUP BY model, operator, stack, method
ORDER BY model, operator DESC, stack, method;
