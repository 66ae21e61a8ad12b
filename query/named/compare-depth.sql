-- question: each model's closure beside that of the other models at the same relative depth
-- param threshold DOUBLE 0..1 = 0.9: closure at or above which a head is strong
-- param bins BIGINT 1..1000 = 4: equal bins of relative depth, layer over last layer
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
    SELECT
        operator,
        stack,
        least(floor(depth * $bins), $bins - 1)::INTEGER AS bin,
        model,
        count(closure) AS defined,
        median(closure) AS median,
        count(*) FILTER (closure >= $threshold) / nullif(count(closure), 0) AS rate
    FROM placed
    GROUP BY operator, stack, bin, model
)
SELECT
    operator,
    stack,
    bin,
    bin / $bins AS depth_from,
    (bin + 1) / $bins AS depth_to,
    model,
    defined,
    median,
    rate,
    avg(median) OVER others AS others_median,
    avg(rate) OVER others AS others_rate,
    median - avg(median) OVER others AS difference
FROM binned
WINDOW others AS (
    PARTITION BY operator, stack, bin ORDER BY model ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING
    EXCLUDE CURRENT ROW
)
ORDER BY operator DESC, stack, bin, model;
