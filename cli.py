"""The command line: the group of all commands, and what every one of them does when it fails."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from query.commands import asking, deriving, ingesting, keeping, measures, publishing
from stats.errors import HeadatlasError

if TYPE_CHECKING:
    pass


class Terminated(KeyboardInterrupt):
    """Somebody asked the process to end, by SIGTERM; it ends as after Ctrl-C."""


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Have SIGTERM raise ``Terminated`` where nobody has said what else it does."""
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def end(*_: object) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class HeadatlasGroup(click.Group):
    """Prints the project's own errors as one message with exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with terminated_like_interrupted():
                return super().invoke(ctx)
        except HeadatlasError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(1)
        except Terminated:
            click.echo("terminated: the store is as it was", err=True)
            ctx.exit(143)
        except KeyboardInterrupt:
            click.echo("interrupted: the store is as it was", err=True)
            ctx.exit(130)
        except BrokenPipeError:
            sys.stderr.close()
            ctx.exit(1)


@click.group(cls=HeadatlasGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="headatlas", prog_name="headatlas")
def main() -> None:
    """Headatlas: a statistical database of the attention heads of transformers.

    \b
    headatlas ingest MODEL          measure a checkpoint once
    headatlas closure               which heads nearly close, T^2 ~ alpha T
    headatlas sql "SELECT ..."      any question about all heads

    MODEL is a Hugging Face directory, a .safetensors, .bin or .gguf file, a hub name
    org/name[@revision], or an https://, s3:// or gs:// address of a directory or file.
    """


for subject in (ingesting, asking, measures, deriving, publishing, keeping):
    for command in subject.COMMANDS:
        main.add_command(command)

if __name__ == "__main__":
    main()
