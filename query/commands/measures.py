"""Commands that answer the paper's questions from what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from query.commands.options import STORED_OPERATORS, format_options, question_options, row_options, store_option
from query.commands.printing import known_models, opened, print_frame, print_rows

if TYPE_CHECKING:
    from query.intervals import RateMethod


def question_command(name: str, groupings: tuple[str, ...], description: str) -> click.Command:
    """The command that asks the question of that name in ``query.questions``."""

    @click.command(name, help=description)
    @question_options(*groupings)
    def command(
        models: tuple[str, ...],
        store_path: Path,
        threshold: float,
        by: str,
        operator: str | None,
        style: str,
        output: Path | None,
        show_sql: bool,
    ) -> None:
        from query import questions

        names = list(models) if show_sql else known_models(store_path, models)
        question = getattr(questions, name)(threshold, by, names, operator)
        print_rows(store_path, question, style, output, show_sql)

    return command


@click.command()
@question_options("model", "layer", "head")
@click.option(
    "--intervals",
    type=click.Choice(("bootstrap", "wilson")),
    help="Add 95% intervals, the rate's by resampling layers or by Wilson at the effective number of heads.",
)
def closure(
    models: tuple[str, ...],
    store_path: Path,
    threshold: float,
    by: str,
    operator: str | None,
    intervals: RateMethod | None,
    style: str,
    output: Path | None,
    show_sql: bool,
) -> None:
    """How many heads of MODELS nearly close: T^2 ~ alpha T.

    --by head lists every head at or above the threshold.

    With --intervals, rate and median have 95% bounds that hold for heads which are not independent: whole
    layers vary, with the heads that share values in them. The median's bounds are always from resampled
    layers. For rates of a few percent wilson is the safer. A rate of 0 or 1 has Wilson bounds in either
    case, with each layer counted as one head. design_effect is how many times the variance of the rate
    exceeds that of independent heads, effective_heads how many of those the heads are worth; the same for
    the median. value_group_effect is the median's with heads of one value in place of heads of one layer,
    1 where every head has its own. The bounds tell about other layers, not about other models.

    \b
    headatlas closure --intervals wilson
    headatlas closure SmolLM2 --threshold 0.8 --intervals bootstrap
    """
    from query import questions

    if intervals is not None:
        if by != "model" or show_sql:
            raise click.UsageError("--intervals goes with --by model, and is no query that --sql could print")
        with opened(store_path) as atlas:
            print_frame(atlas.closure_intervals(threshold, models, operator, intervals), style, output)
        return
    names = list(models) if show_sql else known_models(store_path, models)
    print_rows(store_path, questions.closure(threshold, by, names, operator), style, output, show_sql)


mismatch = question_command(
    "mismatch",
    ("model", "layer"),
    """Closure of one head's O with another head's V, as a null.

    Pairs that share a value projection are no mismatch and do not count.

    \b
    headatlas mismatch
    headatlas mismatch SmolLM2 --by layer --operator raw
    """,
)
algebra = question_command(
    "algebra",
    ("model", "group", "pair"),
    """The right-action law T_i T_j ~ alpha_j T_i where head j is strong.

    The left action and pairs of other value groups are the controls.

    \b
    headatlas algebra
    headatlas algebra SmolLM2 --by group --operator raw
    headatlas algebra --by pair --threshold 0.95
    """,
)


@click.command()
@click.argument("lineages", nargs=-1)
@store_option
@click.option(
    "--threshold", type=click.FloatRange(0, 1), default=0.9, show_default=True, help="Closure of a strong head."
)
@click.option(
    "--by",
    type=click.Choice(("step", "head", "all")),
    default="step",
    show_default=True,
    help="Medians by step; the onset of each head; every head at every step.",
)
@click.option("--operator", type=click.Choice(STORED_OPERATORS), help="One operator only.")
@click.option(
    "--figure", type=click.Path(path_type=Path, dir_okay=False), help="Also draw the medians: .pdf, .svg or .png."
)
@row_options
def trajectory(
    lineages: tuple[str, ...],
    store_path: Path,
    threshold: float,
    by: str,
    operator: str | None,
    figure: Path | None,
    style: str,
    output: Path | None,
    show_sql: bool,
) -> None:
    """Closure, capacity and spectra over the steps of training LINEAGES.

    Heads that are strong at the last step are followed apart from the others. Capacity is there once
    `headatlas capacity` has computed it.

    \b
    headatlas trajectory my-model
    headatlas trajectory my-model --by head --operator raw
    headatlas trajectory my-model --figure trajectory.pdf
    """
    from query import questions

    question = questions.trajectory(threshold, by, lineages, operator)
    if show_sql:
        print_rows(store_path, question, style, output, show_sql)
        return
    from query.drift import require_runs

    with opened(store_path) as atlas:
        require_runs(atlas, lineages)
        if figure is not None:
            from query.figures import save_figure, trajectory_figure
            from query.provenance import provenance

            steps = atlas.ask(questions.trajectory(threshold, "step", lineages, operator))
            source = provenance(atlas, str(questions.trajectory(threshold, "step", lineages, operator)))
            save_figure(trajectory_figure(steps, threshold), figure, source)
        print_frame(atlas.ask(question), style, output)


@click.command()
@click.argument("lineage")
@store_option
@format_options
def drift(lineage: str, store_path: Path, style: str, output: Path | None) -> None:
    """How far each head turns between the steps of LINEAGE; needs ingest --keep-factors.

    \b
    headatlas ingest runs/my-model --lineage my-model --keep-factors
    headatlas drift my-model --format csv --output drift.csv
    """
    from query.drift import drift as between_steps

    with opened(store_path) as atlas:
        print_frame(between_steps(atlas, lineage), style, output)


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODELS...")
@store_option
@click.option("--column", default="closure", show_default=True, help="Numeric column of heads to compare.")
@click.option(
    "--by",
    type=click.Choice(("model", "depth", "head", "pair")),
    default="model",
    show_default=True,
    help="Distributions and effects; medians by relative depth; each head in both; how heads agree in all.",
)
@click.option("--threshold", type=float, help="With --by model: value of a strong head.  [default: 0.9 for closure]")
@click.option("--bins", type=click.IntRange(1, 1000), help="With --by depth: bins of relative depth.  [default: 10]")
@click.option("--operator", type=click.Choice(STORED_OPERATORS), default="raw", show_default=True, help="Which one.")
@click.option("--stack", "stacks", multiple=True, help="A stack to compare; repeatable.  [default: all in common]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the resampled layers.")
@format_options
def compare(
    models: tuple[str, ...],
    store_path: Path,
    column: str,
    by: str,
    threshold: float | None,
    bins: int | None,
    operator: str,
    stacks: tuple[str, ...],
    seed: int,
    style: str,
    output: Path | None,
) -> None:
    """Compare MODELS with the first of them.

    Differences are a model's value less the first one's, with 95% intervals; delta is Cliff's delta, above
    0 where the model's heads tend to have larger values. By head and by pair take models of one shape: a
    fine-tuned one against its base, or two quantisations.

    \b
    headatlas compare SmolLM2-135M Qwen2.5-0.5B
    headatlas compare SmolLM2-135M Qwen2.5-0.5B --by depth --bins 5 --column participation
    headatlas compare base tuned --by pair
    """
    if threshold is not None and by != "model":
        raise click.UsageError("--threshold goes with --by model")
    if bins is not None and by != "depth":
        raise click.UsageError("--bins goes with --by depth")
    from query.comparison import compare as side_by_side
    from query.selection import select

    with opened(store_path) as atlas:
        selection = select(atlas, models, column, operator, stacks)
        for model, left_out in selection.left_out.items():
            click.echo(f"{model}: left out {', '.join(left_out)}, which not every model has", err=True)
        print_frame(side_by_side(selection, by, threshold, bins or 10, seed), style, output)


@click.command()
@store_option
@format_options
@click.option(
    "--threshold", type=click.FloatRange(0, 1), default=0.9, show_default=True, help="Closure of a strong head."
)
def panel(store_path: Path, style: str, output: Path | None, threshold: float) -> None:
    """The published panel numbers beside this store's own.

    A row for every claim and model, and for the models together: `pooled` names them, each set of weights
    once and of a training run the last step. Values of the raw operator have a 95% interval from resampled
    layers, and agree where it reaches what was published. It tells about other layers of the same models,
    so that a difference may be one between models. Claims about scrambles and capacities need
    `headatlas null` and `headatlas capacity` first.

    \b
    headatlas panel
    headatlas panel --threshold 0.95 --format markdown --output panel.md
    """
    with opened(store_path) as atlas:
        print_frame(atlas.panel(threshold), style, output)


COMMANDS = (closure, trajectory, drift, compare, panel, mismatch, algebra)
