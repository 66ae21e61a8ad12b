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
SELECT pairs.*, acting.closure AS acting_closure, acting.alpha AS acting_alpha, acting.kv_head AS acting_kv_head
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
SELECT
    model,
    operator,
    stack,
    layer,
    acting_kv_head AS kv_head,
    read_head,
    any_value(acting_closure) AS closure,
    any_value(acting_alpha) AS alpha,
    count(*) AS products,
    median(right_closure) AS right_median,
    min(right_closure) AS right_minimum,
    median(left_closure) AS left_median,
    avg(right_alpha) AS right_alpha_mean,
    stddev_pop(right_alpha) AS right_alpha_spread
FROM products(threshold)
WHERE shared_value
GROUP BY model, operator, stack, layer, acting_kv_head, read_head
ORDER BY model, operator, stack, layer, kv_head, read_head;

CREATE TEMP MACRO strongest_heads(how_many) AS TABLE
SELECT model, operator, stack, label, layer, head, kv_head, closure, alpha, trace_rank, participation, cos_mean
FROM heads
WHERE closure IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY model, operator, stack ORDER BY closure DESC, layer, head) <= how_many
ORDER BY model, operator, stack, closure DESC, layer, head;

COMMENT ON MACRO TABLE closure_by_model IS 'share of heads at or above a closure threshold, by model';
COMMENT ON MACRO TABLE closure_by_layer IS 'closure by layer, with each layer''s strongest head';
COMMENT ON MACRO TABLE mismatch_by_model IS 'closure of O_i V_j^T over heads of one layer that do not share values';
COMMENT ON MACRO TABLE mismatch_by_layer IS 'the same by layer, beside the largest matched closure';
COMMENT ON MACRO TABLE products IS 'pairs T_i T_j whose acting head j is at or above a closure threshold';
COMMENT ON MACRO TABLE algebra_by_model IS 'right and left action where head j is strong, same value group or not';
COMMENT ON MACRO TABLE algebra_by_group IS 'the right-action law for each strong head over its value group';
COMMENT ON MACRO TABLE strongest_heads IS 'the heads of highest closure of every model';
