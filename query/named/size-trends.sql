-- question: how closure, isometry and participation go with the size of models
-- param threshold DOUBLE 0..1 = 0.9: closure at or above which a head is strong
-- param models VARCHAR[] of models.model = NULL: models to keep; all where NULL
-- param operator VARCHAR of operators.operator = NULL: raw, folded or scaled; each on its own rows where NULL
WITH measured AS (
    SELECT
        model,
        operator,
        stack,
        median(closure) AS closure,
        (count(*) FILTER (closure >= $threshold) / nullif(count(closure), 0))::DOUBLE AS strong_rate,
        median(isometry) AS isometry,
        median(participation) AS participation,
        median(participation / d_head) AS participation_share
    FROM heads
    WHERE ($models IS NULL OR list_contains($models, model)) AND ($operator IS NULL OR operator = $operator)
    GROUP BY model, operator, stack
),
sized AS (
    SELECT
        measured.*,
        CASE WHEN min(layers.d_model) = max(layers.d_model) THEN min(layers.d_model) END::DOUBLE AS d_model,
        count(*)::DOUBLE AS n_layers,
        any_value(models.attention_parameters)::DOUBLE AS attention_parameters,
        any_value(models.total_parameters)::DOUBLE AS total_parameters
    FROM measured
    JOIN layers USING (model, stack)
    JOIN models ON models.model = measured.model
    GROUP BY ALL
),
points AS (
    UNPIVOT (
        UNPIVOT sized ON closure, strong_rate, isometry, participation, participation_share
        INTO NAME statistic VALUE measure
    ) ON d_model, n_layers, attention_parameters, total_parameters INTO NAME size VALUE extent
),
ranked AS (
    SELECT
        *,
        rank() OVER (PARTITION BY operator, stack, statistic, size ORDER BY measure)
            + (count(*) OVER (PARTITION BY operator, stack, statistic, size, measure) - 1) / 2 AS measure_rank,
        rank() OVER (PARTITION BY operator, stack, statistic, size ORDER BY extent)
            + (count(*) OVER (PARTITION BY operator, stack, statistic, size, extent) - 1) / 2 AS extent_rank
    FROM points
)
SELECT
    operator,
    stack,
    statistic,
    size,
    count(*) AS models,
    min(extent) AS smallest,
    max(extent) AS largest,
    CASE WHEN min(extent) < max(extent) THEN regr_slope(measure, log10(extent) ORDER BY model) END AS slope_per_decade,
    CASE
        WHEN min(extent) < max(extent) AND min(measure) < max(measure)
        THEN corr(measure_rank, extent_rank ORDER BY model)
    END AS rank_correlation
FROM ranked
GROUP BY operator, stack, statistic, size
ORDER BY operator DESC, stack, statistic, size;
