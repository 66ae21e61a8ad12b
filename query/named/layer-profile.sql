-- question: everything about one model, layer by layer
-- param model VARCHAR of models.model: the model
-- param threshold DOUBLE 0..1 = 0.9: closure at or above which a head is strong
-- param operator VARCHAR of operators.operator = NULL: raw, folded or scaled; each on its own rows where NULL
WITH shapes AS (
    SELECT
        model,
        operator,
        stack,
        layer,
        median(alpha) AS alpha,
        median(isometry) AS isometry,
        median(participation) AS participation,
        median(cos_mean) AS cos_mean,
        median(copying) AS copying
    FROM heads
    WHERE model = $model
    GROUP BY model, operator, stack, layer
),
mismatched AS (
    SELECT model, operator, stack, layer, median, maximum FROM mismatch_by_layer($threshold) WHERE model = $model
),
scrambled AS (
    SELECT model, operator, stack, layer, null_median, wins, smallest_p FROM null_by_layer()
    WHERE model = $model AND kind = 'scramble'
),
possible AS (
    SELECT model, operator, stack, layer, median, maximum FROM capacity_by_layer($threshold)
    WHERE model = $model AND method = 'assignment'
),
asking AS (
    SELECT model, operator, stack, layer, q_over_k, symmetric_share FROM query_key_by_layer() WHERE model = $model
)
SELECT
    closures.operator,
    closures.stack,
    closures.layer,
    closures.heads,
    closures.defined,
    closures.strong,
    closures.median AS closure,
    closures.maximum AS closure_maximum,
    closures.strongest,
    shapes.alpha,
    shapes.isometry,
    shapes.participation,
    shapes.cos_mean,
    shapes.copying,
    mismatched.median AS mismatch,
    mismatched.maximum AS mismatch_maximum,
    scrambled.null_median,
    scrambled.wins,
    scrambled.smallest_p,
    possible.median AS capacity,
    possible.maximum AS capacity_maximum,
    asking.q_over_k,
    asking.symmetric_share
FROM closure_by_layer($threshold) AS closures
JOIN shapes USING (model, operator, stack, layer)
LEFT JOIN mismatched USING (model, operator, stack, layer)
LEFT JOIN scrambled USING (model, operator, stack, layer)
LEFT JOIN possible USING (model, operator, stack, layer)
LEFT JOIN asking USING (model, operator, stack, layer)
WHERE closures.model = $model AND ($operator IS NULL OR closures.operator = $operator)
ORDER BY closures.operator DESC, closures.stack, closures.layer;
