-- question: closure of each model by relative depth, layer over last layer, in equal bins
-- param threshold DOUBLE 0..1 = 0.9: closure at or above which a head is strong
-- param bins BIGINT 1..1000 = 10: bins of relative depth
-- param models VARCHAR[] of models.model = NULL: models to keep; all where NULL
-- param operator VARCHAR of operators.operator = NULL: raw, folded or scaled; each on its own rows where NULL
WITH placed AS (
    SELECT
        model, operator, stack, layer, label, closure,
        coalesce(layer / nullif(max(layer) OVER (PARTITION BY model, operator, stack), 0), 0) AS depth
    FROM heads
    WHERE ($models IS NULL OR list_contains($models, model)) AND ($operator IS NULL OR operator = $operator)
),
binned AS (
    SELECT *, least(floor(depth * $bins), $bins - 1)::INTEGER AS bin FROM placed
)
SELECT
    model,
    operator,
    stack,
    bin,
    bin / $bins AS depth_from,
    (bin + 1) / $bins AS depth_to,
    count(DISTINCT layer) AS layers,
    count(closure) AS defined,
    count(*) FILTER (closure >= $threshold) AS strong,
    median(closure) AS median,
    quantile_cont(closure, 0.9) AS q90,
    max(closure) AS maximum,
    arg_max(label, closure) AS strongest
FROM binned
GROUP BY model, operator, stack, bin
ORDER BY model, operator DESC, stack, bin;
