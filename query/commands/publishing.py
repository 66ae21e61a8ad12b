"""Commands that make tables, figures and pages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from query.commands.options import STORED_OPERATORS, store_option, timeout_option, usage
from query.commands.printing import opened, print_frame
from query.formats import EXPORT_FORMATS

if TYPE_CHECKING:
    from query.atlas import Atlas


@click.command()
@click.argument("name", required=False, metavar="[NAME]")
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@store_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File to draw to: .pdf, .svg or .png."
)
@click.option(
    "--style",
    type=click.Choice(("screen", "paper")),
    default="screen",
    show_default=True,
    help="paper is one column, 3.3 inches wide, and leaves the title to the caption.",
)
@click.option("--operator", type=click.Choice(STORED_OPERATORS), default="raw", show_default=True, help="Which.")
@click.option("--stack", help="One stack only, where a model has several.")
@click.option("--column", help="heatmap: a number of heads.  [default: closure]")
@click.option("--layer", type=click.IntRange(min=0), help="mismatch, head, algebra: one layer.")
@click.option("--head", type=click.IntRange(min=0), help="head: which, with --layer.  [default: of highest closure]")
@click.option("--threshold", type=click.FloatRange(0, 1), help="Closure of a strong head.  [default: 0.9]")
def plot(
    name: str | None,
    models: tuple[str, ...],
    store_path: Path,
    output: Path | None,
    style: str,
    operator: str,
    stack: str | None,
    column: str | None,
    layer: int | None,
    head: int | None,
    threshold: float | None,
) -> None:
    """Draw the figure NAME of MODELS to a file; without NAME, list the figures.

    What the figure was made from is in the file's metadata. The same store and options on the same day
    give the same bytes.

    \b
    headatlas plot
    headatlas plot heatmap -o closure.pdf --style paper
    headatlas plot heatmap SmolLM2 --column alpha -o alpha.png
    headatlas plot head SmolLM2 --layer 5 --head 3 -o head.svg
    """
    from query.figures import Choice, Style, drawing, figure_list, form_of

    if name is None:
        print_frame(figure_list(), "table", output)
        return
    if output is None:
        raise click.UsageError("plot needs a file to draw to: -o FILE.pdf, .svg or .png")
    form_of(output)
    choice = Choice(models, operator, stack, column, layer, head, threshold, cast(Style, style))
    with opened(store_path) as atlas:
        drawn = drawing(atlas, name, choice)
    drawn.save(output)
    for note in drawn.notes:
        click.echo(f"{name}: {note}", err=True)


@click.command()
@click.argument("words", nargs=-1, metavar="[NAME [MODEL]...]")
@timeout_option
@store_option
@click.option("--query", help="SQL to export instead of a name; - reads it from stdin.")
@click.option(
    "-p", "--param", "--set", "parameters", multiple=True, metavar="NAME=VALUE", help="Value of a parameter of it."
)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File; its ending says the form.")
@click.option("--format", "style", type=click.Choice(EXPORT_FORMATS), help="Form.  [default: by the file's ending]")
@click.option("--operator", type=click.Choice(STORED_OPERATORS), help="One operator only; paper tables take raw.")
@click.option("--threshold", type=click.FloatRange(0, 1), help="Closure of a strong head; paper tables take 0.9.")
@click.option("--caption", help="Caption for latex (as LaTeX) and markdown.")
@click.option("--label", help="Label for latex.  [default: tab:NAME]")
@click.option(
    "--digits",
    type=click.IntRange(1, 16),
    default=3,
    show_default=True,
    help="Significant digits in latex and markdown; other formats keep all.",
)
@click.option("--no-provenance", is_flag=True, help="Leave out where the rows come from.")
@click.option("--check", "checked", is_flag=True, help="Say of exported files whether they still match the store.")
@click.pass_context
def export(
    ctx: click.Context,
    words: tuple[str, ...],
    timeout: float | None,
    store_path: Path,
    query: str | None,
    parameters: tuple[str, ...],
    output: Path | None,
    style: str | None,
    operator: str | None,
    threshold: float | None,
    caption: str | None,
    label: str | None,
    digits: int,
    no_provenance: bool,
    checked: bool,
) -> None:
    """Write a table or a query to a file, ready for a paper.

    NAME is a table of the paper, a table of the catalogue, a macro or a question of `headatlas ask`; without
    one, they are listed. With MODEL (for paper-trajectory: training run), of these only. A file holds where
    its rows come from: the query, the models by content, the version and the day. --check asks again.

    \b
    headatlas export paper-closure -o closure.tex
    headatlas export heads SmolLM2-135M -o heads.parquet
    headatlas export 'strongest_heads(5)' -o strongest.csv
    headatlas export --query "SELECT label, closure FROM heads WHERE closure > 0.9" -o strong.md
    headatlas export --check closure.tex heads.parquet
    """
    with opened(store_path) as atlas:
        atlas.timeout = timeout
        if checked:
            if not words:
                raise click.UsageError("--check needs the files: headatlas export --check FILE...")
            if not print_checks(atlas, [Path(word) for word in words]):
                ctx.exit(1)
            return
        from query.export import Request, listing
        from query.export import export as write

        if query is not None and words:
            raise click.UsageError("give a NAME or --query, not both")
        if query is None and not words:
            print_frame(listing(atlas), "table", None)
            return
        from query.parameters import assignment, split

        request = Request(
            name=words[0] if words else "",
            sql=sys.stdin.read() if query == "-" else query or "",
            parameters=dict(usage(split if query is None else assignment, text) for text in parameters),
            models=words[1:],
            operator=operator,
            threshold=threshold,
        )
        table = write(
            atlas, request, output, style, digits=digits, caption=caption, label=label, sourced=not no_provenance
        )
    for note in table.notes:
        click.echo(note, err=True)
    if output is not None:
        click.echo(f"{output}: {len(table.rows):,} {'row' if len(table.rows) == 1 else 'rows'}", err=True)


def print_checks(atlas: Atlas, files: list[Path]) -> bool:
    """Compare exported files with the store and print what became of each; whether all match."""
    import polars as pl

    from query.checking import check

    findings = [check(atlas, file) for file in files]
    rows = [(finding.file, finding.outcome, finding.detail) for finding in findings]
    print_frame(pl.DataFrame(rows, schema=["file", "outcome", "detail"], orient="row"), "table", None)
    return all(finding.outcome == "ok" for finding in findings)


@click.command()
@click.argument("models", nargs=-1)
@store_option
@click.option("--operator", type=click.Choice(STORED_OPERATORS), help="One operator only.")
@click.option(
    "--threshold", type=click.FloatRange(0, 1), default=0.9, show_default=True, help="Closure of a strong head."
)
@click.option("--title", default="Attention heads", show_default=True, help="What stands above the page.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    default=Path("report.html"),
    show_default=True,
    help="File to write; - is stdout.",
)
def report(
    models: tuple[str, ...],
    store_path: Path,
    operator: str | None,
    threshold: float,
    title: str,
    output: Path,
) -> None:
    """One HTML file of the heads of MODELS, to explore in a browser and to hand on.

    Heatmap, scatter, table and a card for every head, with its spectra, null and pairs. The file needs
    neither a network nor the store.

    \b
    headatlas report
    headatlas report SmolLM2-135M -o smollm2.html
    """
    from query.output import deliver_bytes
    from query.report import report as page

    with opened(store_path) as atlas:
        data = page(atlas, models, operator, threshold, title).encode()
    to_stdout = str(output) == "-"
    deliver_bytes(data, None if to_stdout else output)
    if not to_stdout:
        click.echo(f"{output}: {len(data) / 1e6:.1f} MB")


COMMANDS = (plot, export, report)
