-- question: closure of models side by side: quantiles, rates, nulls, mismatched pairs and capacities
-- param threshold DOUBLE 0..1 = 0.9: closure at or above which a head is strong
-- param models VARCHAR[] of models.model = NULL: models to keep; all where NULL
-- param operator VARCHAR of operators.operator = NULL: raw, folded or scaled; each on its own rows where NULL
WITH own AS (
    SELECT
        model,
        operator,
        stack,
        count(closure) AS defined,
        quantile_cont(closure, 0.1) AS q10,
        quantile_cont(closure, 0.25) AS q25,
        median(closure) AS median,
        quantile_cont(closure, 0.75) AS q75,
        quantile_cont(closure, 0.9) AS q90,
        max(closure) AS maximum,
        count(*) FILTER (closure >= $threshold) / nullif(count(closure), 0) AS rate,
        median(isometry) AS isometry,
        median(cos_mean) AS cos_mean
    FROM heads
    WHERE ($models IS NULL OR list_contains($models, model)) AND ($operator IS NULL OR operator = $operator)
    GROUP BY model, operator, stack
),
mismatched AS (
    SELECT model, operator, stack, median, maximum FROM mismatch_by_model($threshold)
),
scrambled AS (
    SELECT model, operator, stack, null_median, win_rate FROM null_by_model() WHERE kind = 'scramble'
),
possible AS (
    SELECT model, operator, stack, median, attainment_median FROM capacity_by_model($threshold)
    WHERE method = 'assignment'
)
SELECT
    own.*,
    mismatched.median AS mismatch_median,
    mismatched.maximum AS mismatch_maximum,
    scrambled.null_median,
    scrambled.win_rate,
    possible.median AS capacity_median,
    possible.attainment_median
FROM own
LEFT JOIN mismatched USING (model, operator, stack)
LEFT JOIN scrambled USING (model, operator, stack)
LEFT JOIN possible USING (model, operator, stack)
ORDER BY operator DESC, stack, median DESC, model;
