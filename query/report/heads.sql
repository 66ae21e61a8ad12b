SELECT
    heads.*,
    scramble.n_draws,
    scramble.seed AS null_seed,
    scramble.median AS null_median,
    scramble.q95 AS null_q95,
    scramble.q99 AS null_q99,
    scramble.p,
    scramble.p_tail,
    scramble.tail_trusted,
    scramble.q,
    scramble.wins,
    mismatch.n_draws AS mismatches,
    mismatch.median AS mismatch_median,
    mismatch.p AS mismatch_p,
    assignment.closure AS capacity,
    assignment.attainment,
    riemannian.closure AS refined_capacity
FROM heads
LEFT JOIN nulls AS scramble
    ON (scramble.model, scramble.operator, scramble.stack, scramble.layer, scramble.head)
     = (heads.model, heads.operator, heads.stack, heads.layer, heads.head) AND scramble.kind = 'scramble'
LEFT JOIN nulls AS mismatch
    ON (mismatch.model, mismatch.operator, mismatch.stack, mismatch.layer, mismatch.head)
     = (heads.model, heads.operator, heads.stack, heads.layer, heads.head) AND mismatch.kind = 'mismatch'
LEFT JOIN capacities AS assignment
    ON (assignment.model, assignment.operator, assignment.stack, assignment.layer, assignment.head)
     = (heads.model, heads.operator, heads.stack, heads.layer, heads.head) AND assignment.method = 'assignment'
LEFT JOIN capacities AS riemannian
    ON (riemannian.model, riemannian.operator, riemannian.stack, riemannian.layer, riemannian.head)
     = (heads.model, heads.operator, heads.stack, heads.layer, heads.head) AND riemannian.method = 'riemannian'
WHERE list_contains($models, heads.model) AND ($operator IS NULL OR heads.operator = $operator)
ORDER BY heads.model, heads.operator DESC, heads.stack, heads.layer, heads.head
