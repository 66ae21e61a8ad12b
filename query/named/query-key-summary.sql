-- question: the query-key forms of each model
-- param models VARCHAR[] of models.model = NULL: models to keep; all where NULL
-- param operator VARCHAR of operators.operator = NULL: raw, folded or scaled; each on its own rows where NULL
SELECT *
FROM query_key_by_model()
WHERE ($models IS NULL OR list_contains($models, model)) AND ($operator IS NULL OR operator = $operator)
ORDER BY model, operator DESC, stack;
