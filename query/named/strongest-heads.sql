-- question: the heads of highest closure of each model
-- param how_many BIGINT 1.. = 10: heads of each model, operator and stack
-- param models VARCHAR[] of models.model = NULL: models to keep; all where NULL
-- param operator VARCHAR of operators.operator = NULL: raw, folded or scaled; each on its own rows where NULL
SELECT *
FROM strongest_heads($how_many)
WHERE ($models IS NULL OR list_contains($models, model)) AND ($operator IS NULL OR operator = $operator)
ORDER BY model, operator DESC, stack, closure DESC, layer, head;
