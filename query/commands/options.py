"""Options that commands share, and the kinds of values they take."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import click

from query.commands.printing import Result
from query.formats import FORMATS
from stats.errors import QueryError

if TYPE_CHECKING:
    pass


STORED_OPERATORS = ("raw", "folded", "scaled")
OPERATORS = {"raw": ("raw",), "folded": ("folded",), "scaled": ("scaled",), "both": ("raw", "folded")}
Command = TypeVar("Command", bound=Callable[..., Any])


class StoreLocation(click.Path):
    """A store's directory; of a store at an address, the copy of its catalogue."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A path."""
        if isinstance(value, str) and "://" in value:
            from query.remote_store import mirrored

            return mirrored(value)
        return super().convert(value, param, ctx)


def store_option(command: Command) -> Command:
    """``--store`` as every command has it."""
    return click.option(
        "--store",
        "store_path",
        type=StoreLocation(path_type=Path, file_okay=False),
        envvar="HEADATLAS_STORE",
        default=Path("atlas"),
        show_default="$HEADATLAS_STORE, else ./atlas",
        help="Directory of the store; to ask only, also its https://, s3:// or gs:// address.",
    )(command)


def row_options(command: Command) -> Command:
    """Output options of every command that prints rows."""
    command = click.option("--sql", "show_sql", is_flag=True, help="Print the query instead of running it.")(command)
    return format_options(command)


def timeout_option(command: Command) -> Command:
    """``--timeout`` of the commands that run what a user writes."""
    return click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        help="Stop the query after that long.  [default: never]",
    )(command)


def format_options(command: Command) -> Command:
    """``--format`` and ``--output``."""
    command = click.option(
        "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write to a file instead of stdout."
    )(command)
    return click.option(
        "--format", "style", type=click.Choice(FORMATS), default="table", show_default=True, help="Form of the rows."
    )(command)


def question_options(*groupings: str) -> Callable[[Command], Command]:
    """Options of the questions about heads: which models, threshold, grouping, operator."""

    def decorate(command: Command) -> Command:
        for option in (
            row_options,
            click.option("--operator", type=click.Choice(STORED_OPERATORS), help="One operator only."),
            click.option(
                "--by", type=click.Choice(groupings), default=groupings[0], show_default=True, help="A row per what."
            ),
            click.option(
                "--threshold",
                type=click.FloatRange(0, 1),
                default=0.9,
                show_default=True,
                help="Closure at or above which a head is strong.",
            ),
            store_option,
            click.argument("models", nargs=-1),
        ):
            command = option(command)
        return command

    return decorate


def checkpoint_options(command: Command) -> Command:
    """What can be said about a checkpoint that does not say it itself."""
    for option in (
        click.option("--family", help="model_type to assume where the configuration names none."),
        click.option(
            "--config",
            "config_path",
            type=click.Path(path_type=Path, exists=True, dir_okay=False),
            help="config.json for a file that has none beside it.",
        ),
        click.option("--base", metavar="MODEL", help="Where MODEL is a LoRA adapter, the model it changes."),
        click.option(
            "--operator",
            type=click.Choice(tuple(OPERATORS)),
            default="raw",
            show_default=True,
            help="Weights as stored; norms folded in; scaled too by what multiplies the branch; the first two.",
        ),
    ):
        command = option(command)
    return command


class ByteSize(click.ParamType[int]):
    """A number of bytes, such as 500MB, 8GiB or 2000000."""

    name = "size"
    UNITS: ClassVar = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes of the text."""
        if isinstance(value, int):
            return value
        number = value.rstrip(string.ascii_letters)
        unit = self.UNITS.get(value[len(number) :].strip().lower())
        try:
            size = int(float(number) * unit) if unit else 0
        except (ValueError, OverflowError):
            size = 0
        if size <= 0:
            self.fail(f"{value!r} is no size such as 500MB or 8GiB", param, ctx)
        return size


class Part(click.ParamType[tuple[int, int]]):
    """``i/n``: part i of n, from 1."""

    name = "i/n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Number and count."""
        if isinstance(value, tuple):
            return cast("tuple[int, int]", value)
        number, _, count = value.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            self.fail(f"{value!r} is no part such as 3/16, from 1/16 to 16/16", param, ctx)
        return int(number), int(count)


def measuring_options(command: Command) -> Command:
    """How and under what name a checkpoint is measured; ``assemble`` has to be told the same."""
    for option in (
        click.option("--keep-factors", is_flag=True, help="Also store what each head reads and writes; large."),
        click.option(
            "--dtype",
            type=click.Choice(("float64", "float32")),
            default="float64",
            show_default=True,
            help="Precision of the tall products; small matrices are always float64.",
        ),
        click.option(
            "--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, ...; auto takes a GPU if any."
        ),
        click.option(
            "--step", type=click.IntRange(min=0), help="Training step within the lineage.  [default: from the name]"
        ),
        click.option("--lineage", help="Training run the checkpoints belong to."),
        click.option("--replace", "replace_existing", is_flag=True, help="Replace a stored model of that name."),
        click.option("--name", help="Name in the store.  [default: the directory, file or hub name]"),
        store_option,
        checkpoint_options,
    ):
        command = option(command)
    return command


def usage(read: Callable[[str], Result], text: str) -> Result:
    """What is read from an option's text; what cannot be read is a mistake in the use of the command."""
    try:
        return read(text)
    except QueryError as error:
        raise click.UsageError(str(error)) from error


def derivation_options(command: Command) -> Command:
    """Options of the commands that derive something from stored spectra."""
    for option in (
        row_options,
        click.option("--device", default="auto", show_default=True, help="cpu, cuda, ...; auto takes a GPU if any."),
        click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Random seed."),
        click.option("--operator", type=click.Choice(STORED_OPERATORS), help="One operator only.  [default: all]"),
        click.option(
            "--by",
            type=click.Choice(("model", "layer", "head")),
            default="model",
            show_default=True,
            help="A row per what.",
        ),
        store_option,
        click.argument("models", nargs=-1),
    ):
        command = option(command)
    return command


def taking_options(command: Command) -> Command:
    """What is to be done where models that are taken in clash with those that are here."""
    for option in (
        click.option("--replace", "replace_existing", is_flag=True, help="Replace models of other content."),
        click.option(
            "--rename", "renames", multiple=True, metavar="OLD=NEW", help="Take the model OLD under a new name."
        ),
        click.option("--without", multiple=True, metavar="NAME", help="Leave the derived statistic NAME there."),
        store_option,
    ):
        command = option(command)
    return command
