-- question: trained heads against their nulls, by layer
-- param kind VARCHAR of nulls.kind = NULL: scramble or mismatch; each on its own rows where NULL
-- param models VARCHAR[] of models.model = NULL: models to keep; all where NULL
-- param operator VARCHAR of operators.operator = NULL: raw, folded or scaled; each on its own rows where NULL
SELECT *
FROM null_by_layer()
WHERE ($models IS NULL OR list_contains($models, model)) AND ($operator IS NULL OR operator = $operator)
    AND ($kind IS NULL OR kind = $kind)
ORDER BY model, operator DESC, stack, kind, layer;
