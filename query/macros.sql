-- Table macros that answer the common questions by name. They are installed as temporary macros at
-- every open, so that they never go stale in the file. Each COMMENT is shown by `headatlas schema`.

CREATE TEMP MACRO closure_by_model(threshold) AS TABLE
SELECT
    model,
    operator,
    stack,
    count(*) AS heads,
    count(closure) AS defined,
    count(*) FILTER (closure >= threshold) AS strong,
    count(*) FILTER (closure >= threshold) / nullif(count(closure), 0) AS rate,
    median(closure) AS median,
    quantile_cont(closure, 0.9) AS q90,
    max(closure) AS maximum,
    count(*) FILTER (closure >= threshold AND alpha < 0) AS strong_negative
FROM heads
GROUP BY model, operator, stack
ORDER BY model, operator, stack;

CREATE TEMP MACRO closure_by_layer(threshold) AS TABLE
SELECT
    model,
    operator,
    stack,
    layer,
    count(*) AS heads,
    count(closure) AS defined,
    count(*) FILTER (closure >= threshold) AS strong,
    median(closure) AS median,
    max(closure) AS maximum,
    arg_max(label, closure) AS strongest
FROM heads
GROUP BY model, operator, stack, layer
ORDER BY model, operator, stack, layer;

CREATE TEMP MACRO mismatch_by_model(threshold) AS TABLE
SELECT
    model,
    operator,
    stack,
    count(*) FILTER (NOT shared_value) AS mismatched_pairs,
    median(mismatch_closure) FILTER (NOT shared_value) AS median,
    max(mismatch_closure) FILTER (NOT shared_value) AS maximum,
    count(*) FILTER (NOT shared_value AND mismatch_closure >= threshold) AS strong,
    arg_max('L' || layer || ' O' || write_head || ' V' || read_head, mismatch_closure)
        FILTER (NOT shared_value) AS largest_pair
FROM pairs
GROUP BY model, operator, stack
ORDER BY model, operator, stack;

CREATE TEMP MACRO mismatch_by_layer(threshold) AS TABLE
SELECT
    pairs.model,
    pairs.operator,
    pairs.stack,
    pairs.layer,
    count(*) FILTER (NOT shared_value) AS mismatched_pairs,
    median(mismatch_closure) FILTER (NOT shared_value) AS median,
    max(mismatch_closure) FILTER (NOT shared_value) AS maximum,
    any_value(matched.maximum) AS matched_maximum
FROM pairs
JOIN closure_by_layer(threshold) AS matched
    ON (pairs.model, pairs.operator, pairs.stack, pairs.layer)
     = (matched.model, matched.operator, matched.stack, matched.layer)
GROUP BY pairs.model, pairs.operator, pairs.stack, pairs.layer
ORDER BY pairs.model, pairs.operator, pairs.stack, pairs.layer;

CREATE TEMP MACRO products(threshold) AS TABLE
SELECT
    pairs.*,
    acting.closure AS acting_closure,
    acting.alpha AS acting_alpha,
    acting.kv_head AS acting_kv_head,
    acting.sigma_max AS acting_sigma_max,
    acting.cos_min AS acting_cos_min
FROM pairs
JOIN heads AS acting
    ON (pairs.model, pairs.operator, pairs.stack, pairs.layer, pairs.read_head)
     = (acting.model, acting.operator, acting.stack, acting.layer, acting.head)
WHERE acting.closure >= threshold
ORDER BY pairs.model, pairs.operator, pairs.stack, pairs.layer, pairs.write_head, pairs.read_head;

CREATE TEMP MACRO algebra_by_model(threshold) AS TABLE
SELECT
    model,
    operator,
    stack,
    CASE WHEN shared_value THEN 'same group' ELSE 'other group' END AS pairing,
    count(*) AS products,
    count(DISTINCT (layer, read_head)) AS strong_heads,
    median(right_closure) AS right_median,
    min(right_closure) AS right_minimum,
    median(left_closure) AS left_median,
    max(left_closure) AS left_maximum
FROM products(threshold)
GROUP BY ALL
ORDER BY model, operator, stack, pairing DESC;

CREATE TEMP MACRO algebra_by_group(threshold) AS TABLE
WITH other AS (
    SELECT model, operator, stack, layer, read_head, median(right_closure) AS other_right_median
    FROM products(threshold) WHERE NOT shared_value GROUP BY ALL
)
SELECT
    products.model,
    products.operator,
    products.stack,
    products.layer,
    acting_kv_head AS kv_head,
    products.read_head,
    any_value(acting_closure) AS closure,
    any_value(acting_alpha) AS alpha,
    count(*) AS products,
    median(right_closure) AS right_median,
    min(right_closure) AS right_minimum,
    median(left_closure) AS left_median,
    any_value(other_right_median) AS other_right_median,
    avg(right_alpha) AS right_alpha_mean,
    stddev_pop(right_alpha) AS right_alpha_spread,
    max(abs(right_alpha - acting_alpha)) / abs(any_value(acting_alpha)) AS alpha_distance,
    min(range_angle_min) AS range_angle_min,
    median(range_angle_max) AS range_angle_max,
    any_value(acting_sigma_max) / abs(any_value(acting_alpha)) AS projection_norm,
    1 / nullif(any_value(acting_cos_min), 0) AS oblique_norm
FROM products(threshold) AS products
LEFT JOIN other
    ON (products.model, products.operator, products.stack, products.layer, products.read_head)
     = (other.model, other.operator, other.stack, other.layer, other.read_head)
WHERE shared_value
GROUP BY
    products.model, products.operator, products.stack, products.layer, acting_kv_head, products.read_head
ORDER BY products.model, products.operator, products.stack, products.layer, kv_head, products.read_head;

CREATE TEMP MACRO strongest_heads(how_many) AS TABLE
SELECT model, operator, stack, label, layer, head, kv_head, closure, alpha, trace_rank, participation, cos_mean
FROM heads
WHERE closure IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY model, operator, stack ORDER BY closure DESC, layer, head) <= how_many
ORDER BY model, operator, stack, closure DESC, layer, head;

CREATE TEMP MACRO null_by_model() AS TABLE
SELECT
    model,
    operator,
    stack,
    kind,
    count(*) AS heads,
    count(p) AS defined,
    any_value(n_draws) FILTER (kind = 'scramble') AS draws,
    median(closure) FILTER (p IS NOT NULL) AS trained_median,
    median(median) AS null_median,
    count(*) FILTER (wins) AS wins,
    count(*) FILTER (wins) / nullif(count(p), 0) AS win_rate,
    count(*) FILTER (p <= 0.05) AS significant,
    count(*) FILTER (q <= 0.05) AS discoveries,
    max(median_se) AS largest_error
FROM nulls
JOIN heads USING (model, operator, stack, layer, head)
GROUP BY model, operator, stack, kind
ORDER BY model, operator, stack, kind;

CREATE TEMP MACRO null_by_layer() AS TABLE
SELECT
    model,
    operator,
    stack,
    layer,
    kind,
    count(*) AS heads,
    count(p) AS defined,
    median(closure) FILTER (p IS NOT NULL) AS trained_median,
    median(median) AS null_median,
    count(*) FILTER (wins) AS wins,
    median(closure) FILTER (p IS NOT NULL) > median(median) AS layer_wins,
    min(p) AS smallest_p
FROM nulls
JOIN heads USING (model, operator, stack, layer, head)
GROUP BY model, operator, stack, layer, kind
ORDER BY model, operator, stack, layer, kind;

CREATE TEMP MACRO matched_ranks() AS TABLE
SELECT
    heads.model,
    heads.operator,
    heads.stack,
    heads.layer,
    heads.head,
    heads.label,
    heads.closure,
    1 + count(*) FILTER (mismatch_closure > heads.closure) AS rank,
    1 + count(*) AS candidates,
    max(mismatch_closure) AS largest_mismatch
FROM heads
JOIN pairs
    ON (heads.model, heads.operator, heads.stack, heads.layer)
     = (pairs.model, pairs.operator, pairs.stack, pairs.layer)
WHERE NOT shared_value AND mismatch_closure IS NOT NULL AND heads.closure IS NOT NULL
GROUP BY ALL
ORDER BY heads.model, heads.operator, heads.stack, heads.layer, heads.head;

CREATE TEMP MACRO capacity_by_model(threshold) AS TABLE
WITH by_layer AS (
    SELECT model, operator, stack, method, layer, max(closure) AS highest, median(closure) AS middle
    FROM capacities
    GROUP BY model, operator, stack, method, layer
),
layers AS (
    SELECT
        model,
        operator,
        stack,
        method,
        count(*) FILTER (highest >= threshold) AS feasible_layers,
        count(*) AS layers,
        min(highest) AS lowest_layer_maximum,
        min(middle) AS lowest_layer_median
    FROM by_layer
    GROUP BY model, operator, stack, method
)
SELECT
    model,
    operator,
    stack,
    method,
    count(*) AS heads,
    count(capacities.closure) AS defined,
    median(capacities.closure) AS median,
    min(capacities.closure) AS minimum,
    count(*) FILTER (capacities.closure >= threshold) AS feasible,
    count(*) FILTER (heads.closure >= threshold) AS attained,
    median(attainment) AS attainment_median,
    any_value(layers.feasible_layers) AS feasible_layers,
    any_value(layers.layers) AS layers,
    any_value(layers.lowest_layer_maximum) AS lowest_layer_maximum,
    any_value(layers.lowest_layer_median) AS lowest_layer_median
FROM capacities
JOIN heads USING (model, operator, stack, layer, head)
JOIN layers USING (model, operator, stack, method)
GROUP BY model, operator, stack, method
ORDER BY model, operator, stack, method;

CREATE TEMP MACRO capacity_by_layer(threshold) AS TABLE
SELECT
    model,
    operator,
    stack,
    layer,
    method,
    count(capacities.closure) AS heads,
    median(capacities.closure) AS median,
    max(capacities.closure) AS maximum,
    count(*) FILTER (capacities.closure >= threshold) AS feasible,
    count(*) FILTER (heads.closure >= threshold) AS attained,
    max(heads.closure) AS trained_maximum
FROM capacities
JOIN heads USING (model, operator, stack, layer, head)
GROUP BY model, operator, stack, layer, method
ORDER BY model, operator, stack, layer, method;

CREATE TEMP MACRO lineage_heads(threshold) AS TABLE
WITH steps AS (
    SELECT lineage, step, model, max(step) OVER (PARTITION BY lineage) AS last_step
    FROM models
    WHERE lineage IS NOT NULL AND step IS NOT NULL
),
final AS (
    SELECT steps.lineage, operator, stack, layer, head, closure >= threshold AS strong
    FROM heads JOIN steps USING (model) WHERE steps.step = steps.last_step
)
SELECT
    steps.lineage,
    heads.operator,
    heads.stack,
    steps.step,
    heads.model,
    heads.layer,
    heads.head,
    heads.label,
    CASE WHEN final.strong THEN 'final strong' ELSE 'others' END AS cohort,
    heads.closure,
    heads.alpha,
    capacities.closure AS capacity,
    nulls.median AS null_median,
    coalesce(nulls.median, 0.4549 * heads.null_scale) AS null_level,
    heads.norm,
    heads.sigma_max,
    heads.participation,
    heads.isometry,
    heads.cos_mean,
    heads.copying
FROM heads
JOIN steps USING (model)
JOIN final
    ON (final.lineage, final.operator, final.stack, final.layer, final.head)
     = (steps.lineage, heads.operator, heads.stack, heads.layer, heads.head)
LEFT JOIN capacities
    ON (capacities.model, capacities.operator, capacities.stack, capacities.layer, capacities.head)
     = (heads.model, heads.operator, heads.stack, heads.layer, heads.head) AND method = 'assignment'
LEFT JOIN nulls
    ON (nulls.model, nulls.operator, nulls.stack, nulls.layer, nulls.head)
     = (heads.model, heads.operator, heads.stack, heads.layer, heads.head) AND kind = 'scramble'
ORDER BY steps.lineage, heads.operator, heads.stack, heads.layer, heads.head, steps.step;

CREATE TEMP MACRO trajectory_by_step(threshold) AS TABLE
SELECT
    lineage,
    operator,
    stack,
    cohort,
    step,
    count(*) AS heads,
    count(*) FILTER (closure >= threshold) AS strong,
    median(closure) AS closure,
    median(alpha) AS alpha,
    median(capacity) AS capacity,
    median(null_level) AS null_level,
    median(sigma_max) AS sigma_max,
    median(participation) AS participation,
    median(isometry) AS isometry,
    median(cos_mean) AS cos_mean
FROM lineage_heads(threshold)
GROUP BY lineage, operator, stack, cohort, step
ORDER BY lineage, operator, stack, cohort, step;

CREATE TEMP MACRO onsets(threshold) AS TABLE
WITH held AS (
    SELECT
        *,
        min(CASE WHEN closure >= threshold THEN 1 ELSE 0 END) OVER (
            PARTITION BY lineage, operator, stack, layer, head ORDER BY step
            ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING
        ) = 1 AS stays
    FROM lineage_heads(threshold)
)
SELECT
    lineage,
    operator,
    stack,
    label,
    layer,
    head,
    cohort,
    min(step) FILTER (stays) AS onset,
    arg_min(closure, step) AS first_closure,
    arg_max(closure, step) AS final_closure,
    arg_min(capacity, step) AS first_capacity,
    arg_max(capacity, step) AS final_capacity,
    arg_max(alpha, step) AS final_alpha
FROM held
GROUP BY ALL
ORDER BY lineage, operator, stack, layer, head;

CREATE TEMP MACRO repeated_layers() AS TABLE
SELECT
    mine.stack,
    one.lineage,
    one.model AS model,
    other.model AS same_as,
    count(*) AS layers,
    any_value(one.n_layers) AS of_layers,
    one.content_hash = other.content_hash AS whole_model
FROM layers AS mine
JOIN layers AS theirs USING (stack, layer, content_hash)
JOIN models AS one ON mine.model = one.model
JOIN models AS other ON theirs.model = other.model
WHERE (coalesce(one.step, 0), one.model) > (coalesce(other.step, 0), other.model)
GROUP BY mine.stack, one.lineage, one.model, other.model, one.content_hash, other.content_hash
ORDER BY one.lineage, one.model, other.model;

CREATE TEMP MACRO isometry_by_depth(bins) AS TABLE
WITH placed AS (
    SELECT
        model, operator, stack, layer, isometry, d_model, d_head,
        coalesce(layer / nullif(max(layer) OVER (PARTITION BY model, operator, stack), 0), 0) AS depth
    FROM heads
    WHERE bins >= 1
),
binned AS (
    SELECT *, bin / bins AS depth_from, (bin + 1) / bins AS depth_to
    FROM (SELECT *, least(floor(depth * bins), bins - 1)::INTEGER AS bin FROM placed)
)
SELECT
    model,
    operator,
    stack,
    bin,
    any_value(depth_from) AS depth_from,
    any_value(depth_to) AS depth_to,
    count(DISTINCT layer) AS layers,
    count(isometry) AS heads,
    median(isometry) AS median,
    quantile_cont(isometry, 0.25) AS q25,
    quantile_cont(isometry, 0.75) AS q75,
    CASE WHEN min(d_model) = max(d_model) THEN min(d_model) END AS d_model,
    CASE WHEN min(d_head) = max(d_head) THEN min(d_head) END AS d_head
FROM binned
GROUP BY model, operator, stack, bin
ORDER BY model, operator, stack, bin;

CREATE TEMP MACRO isometry_by_model() AS TABLE
SELECT
    heads.model,
    heads.operator,
    heads.stack,
    count(heads.isometry) AS heads,
    median(heads.isometry) AS isometry,
    median(heads.participation) AS participation,
    median(heads.cos_mean) AS cos_mean,
    CASE WHEN min(heads.d_model) = max(heads.d_model) THEN min(heads.d_model) END AS d_model,
    CASE WHEN min(heads.d_head) = max(heads.d_head) THEN min(heads.d_head) END AS d_head,
    count(DISTINCT heads.layer) AS n_layers,
    any_value(models.attention_parameters) AS attention_parameters,
    any_value(models.total_parameters) AS total_parameters
FROM heads
JOIN models ON heads.model = models.model
GROUP BY heads.model, heads.operator, heads.stack
ORDER BY heads.model, heads.operator, heads.stack;

CREATE TEMP MACRO query_key_by_model() AS TABLE
SELECT
    qk.model,
    qk.operator,
    qk.stack,
    count(participation_q / participation_k) AS heads,
    median(participation_q) AS participation_q,
    median(participation_k) AS participation_k,
    median(participation_q / participation_k) AS q_over_k,
    count(*) FILTER (participation_q > participation_k) / nullif(count(participation_q / participation_k), 0)
        AS q_larger,
    median(symmetric_share) AS symmetric_share,
    median(cos_mean) AS cos_mean,
    CASE WHEN min(d_model) = max(d_model) THEN min(d_model) END AS d_model,
    CASE WHEN min(d_key) = max(d_key) THEN min(d_key) END AS d_key
FROM qk
JOIN layers ON (qk.model, qk.stack, qk.layer) = (layers.model, layers.stack, layers.layer)
GROUP BY qk.model, qk.operator, qk.stack
ORDER BY qk.model, qk.operator, qk.stack;

CREATE TEMP MACRO query_key_by_layer() AS TABLE
SELECT
    model,
    operator,
    stack,
    layer,
    count(participation_q / participation_k) AS heads,
    median(participation_q) AS participation_q,
    median(participation_k) AS participation_k,
    median(participation_q / participation_k) AS q_over_k,
    count(*) FILTER (participation_q > participation_k) / nullif(count(participation_q / participation_k), 0)
        AS q_larger,
    median(symmetric_share) AS symmetric_share,
    median(cos_mean) AS cos_mean
FROM qk
GROUP BY model, operator, stack, layer
ORDER BY model, operator, stack, layer;

CREATE TEMP MACRO provenance(name) AS TABLE
SELECT
    runs.*,
    models.source,
    models.revision,
    models.content_hash,
    models.qk_hash,
    models.array_group
FROM (
    SELECT
        model, operator, 'measured' AS kind, operator AS unit, gain_hash, device, compute_dtype, rank_cut,
        NULL::INTEGER AS n_draws, NULL::BIGINT AS seed, NULL::BOOLEAN AS independent, NULL::INTEGER AS random_starts,
        seconds, created_at, tool_version, libraries
    FROM operators
    UNION ALL BY NAME
    SELECT
        model, operator, kind, unit, n_draws, seed, independent, random_starts,
        seconds, created_at, tool_version, libraries
    FROM derivations
) AS runs
JOIN models USING (model)
WHERE runs.model = name
ORDER BY runs.operator DESC, runs.kind = 'measured' DESC, runs.kind;

COMMENT ON MACRO TABLE provenance IS 'from which bytes, code and settings each operator and derivation of a model came';
COMMENT ON MACRO TABLE closure_by_model IS 'share of heads at or above a closure threshold, by model';
COMMENT ON MACRO TABLE closure_by_layer IS 'closure by layer, with each layer''s strongest head';
COMMENT ON MACRO TABLE mismatch_by_model IS 'closure of O_i V_j^T over heads of one layer that do not share values';
COMMENT ON MACRO TABLE mismatch_by_layer IS 'the same by layer, beside the largest matched closure';
COMMENT ON MACRO TABLE products IS 'pairs T_i T_j whose acting head j is at or above a closure threshold';
COMMENT ON MACRO TABLE algebra_by_model IS 'right and left action where head j is strong, same value group or not';
COMMENT ON MACRO TABLE algebra_by_group IS 'the right-action law for each strong head over its value group';
COMMENT ON MACRO TABLE strongest_heads IS 'the heads of highest closure of every model';
COMMENT ON MACRO TABLE null_by_model IS 'trained heads against their nulls, by model and kind of null';
COMMENT ON MACRO TABLE null_by_layer IS 'trained heads against their nulls, by layer';
COMMENT ON MACRO TABLE matched_ranks IS 'rank of each head''s closure among the mismatched pairs of its layer';
COMMENT ON MACRO TABLE capacity_by_model IS 'capacities beside what heads attain, by model and method';
COMMENT ON MACRO TABLE capacity_by_layer IS 'capacities beside what heads attain, by layer and method';
COMMENT ON MACRO TABLE lineage_heads IS 'every head at every step of a training run, final strong heads apart';
COMMENT ON MACRO TABLE trajectory_by_step IS 'medians over training steps, for finally strong heads and the others';
COMMENT ON MACRO TABLE onsets IS 'first step from which on a head stays at or above the threshold';
COMMENT ON MACRO TABLE repeated_layers IS 'layers whose values and outputs two checkpoints share exactly';
COMMENT ON MACRO TABLE isometry_by_depth IS 'scaled isometry by relative depth, layer over last layer, in equal bins';
COMMENT ON MACRO TABLE isometry_by_model IS 'medians of scaled isometry, participation and cosine beside sizes';
COMMENT ON MACRO TABLE query_key_by_model IS 'medians of the query-key form; q_over_k and q_larger are head by head';
COMMENT ON MACRO TABLE query_key_by_layer IS 'medians of the query-key form by layer; q_over_k and q_larger are head by head';
