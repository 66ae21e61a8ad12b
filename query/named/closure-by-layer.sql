-- question: closure layer by layer, with each layer's strongest head
-- param threshold DOUBLE 0..1 = 0.9: closure at or above which a head is strong
-- param models VARCHAR[] of models.model = NULL: models to keep; all where NULL
-- param operator VARCHAR of operators.operator = NULL: raw, folded or scaled; each on its own rows where NULL
SELECT *
FROM closure_by_layer($threshold)
WHERE ($models IS NULL OR list_contains($models, model)) AND ($operator IS NULL OR operator = $operator)
ORDER BY model, operator DESC, stack, layer;
