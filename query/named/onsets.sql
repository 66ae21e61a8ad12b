-- question: the step of a training run from which on each head stays strong
-- param threshold DOUBLE 0..1 = 0.9: closure at or above which a head is strong
-- param lineages VARCHAR[] of models.lineage = NULL: training runs to keep; all where NULL
-- param operator VARCHAR of operators.operator = NULL: raw, folded or scaled; each on its own rows where NULL
SELECT *
FROM onsets($threshold)
WHERE ($lineages IS NULL OR list_contains($lineages, lineage)) AND ($operator IS NULL OR operator = $operator)
ORDER BY lineage, operator DESC, stack, final_closure DESC, layer, head;
