"""Print the list of the named questions as their files declare them.

python docs/make_questions.py > docs/questions.md
"""

from __future__ import annotations

from collections.abc import Iterator

from query.named import questions
from query.named_question import NamedQuestion, Parameter

OWN = """## Your own

A file `NAME.sql` in the directory `queries` of the store is asked for as NAME. It begins with its header, and
goes on with one reading statement that uses each parameter as `$name` or `:name`:

```sql
-- question: heads of large alpha
-- param size DOUBLE 0.. = 0.5: alpha at or above which a head is kept
-- param models VARCHAR[] of models.model = NULL: models to keep; all where NULL
-- param layer BIGINT 0..: the layer
SELECT model, operator, label, alpha
FROM heads
WHERE alpha >= $size AND layer = $layer AND ($models IS NULL OR list_contains($models, model))
ORDER BY alpha DESC;
```

- The first line says what is answered, every other line of the header declares a parameter:
  `-- param NAME TYPE [LOW..HIGH | of TABLE.COLUMN] [= DEFAULT]: MEANING`.
- Types are DOUBLE, BIGINT, BOOLEAN and VARCHAR, and lists of them but BOOLEAN, such as `VARCHAR[]`.
- `LOW..HIGH` bounds numbers; either may be left out. `of TABLE.COLUMN` says that values are those of a column.
- A default is JSON, or `NULL`, which means that NULL can be given. Without a default a value has to be given.
- A name has small letters, digits, `-` and `_`. A question of the program keeps its name.

`headatlas ask` lists a file that cannot be read as a warning with its line; the other questions go on working."""


def cell(text: str) -> str:
    """Text that stays inside one cell of a Markdown table."""
    return text.replace("|", "\\|")


def lines() -> Iterator[str]:
    """The document, line by line."""
    found = list(questions().by_name.values())
    yield "# Questions"
    yield ""
    yield "Generated from the files in `query/named` by `make docs`; do not edit."
    yield ""
    yield "`headatlas ask` lists them, `headatlas ask NAME --set PARAMETER=VALUE` asks one, `--sql` prints the query"
    yield "with its values; in Python, `atlas.ask(NAME, parameter=value)`. Lists are JSON, or one element as it is."
    yield ""
    yield "| question | answers |"
    yield "|---|---|"
    for question in found:
        yield f"| [`{question.name}`](#{question.name}) | {cell(question.description)} |"
    for question in found:
        yield from section(question)
    yield ""
    yield from OWN.splitlines()


def section(question: NamedQuestion) -> Iterator[str]:
    """One question with its parameters."""
    yield ""
    yield f"## {question.name}"
    yield ""
    yield f"{question.description[0].upper()}{question.description[1:]}."
    yield ""
    yield "| parameter | type | values | default | meaning |"
    yield "|---|---|---|---|---|"
    for parameter in question.parameters:
        default = f"`{parameter.default_text()}`" if not parameter.required else "has to be given"
        cells = (f"`{parameter.name}`", parameter.sql_type, values(parameter), default, cell(parameter.meaning))
        yield f"| {' | '.join(cells)} |"


def values(parameter: Parameter) -> str:
    """What a parameter can be, in words."""
    return parameter.bounds_text() or (f"`{'.'.join(parameter.column)}`" if parameter.column else "")


if __name__ == "__main__":
    print("\n".join(lines()))
