-- question: closure of one head's O with another head's V beside the heads' own, by model
-- param threshold DOUBLE 0..1 = 0.9: closure at or above which a head is strong
-- param models VARCHAR[] of models.model = NULL: models to keep; all where NULL
-- param operator VARCHAR of operators.operator = NULL: raw, folded or scaled; each on its own rows where NULL
SELECT
    mismatch_by_model.*,
    closure_by_model.median AS trained_median,
    closure_by_model.maximum AS trained_maximum,
    closure_by_model.strong AS trained_strong,
    closure_by_model.median / nullif(mismatch_by_model.median, 0) AS trained_over_mismatched
FROM mismatch_by_model($threshold) AS mismatch_by_model
JOIN closure_by_model($threshold) AS closure_by_model USING (model, operator, stack)
WHERE ($models IS NULL OR list_contains($models, model)) AND ($operator IS NULL OR operator = $operator)
ORDER BY model, operator DESC, stack;
