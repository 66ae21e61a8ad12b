"""Print the reference of the command line: every command's help.

python docs/make_commands.py > docs/commands.md
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from cli import main

WIDTH = 100


def lines() -> Iterator[str]:
    """The document, line by line."""
    yield "# Commands"
    yield ""
    yield "Generated from the help of the commands by `make docs`; do not edit."
    yield ""
    program = context("headatlas", main)
    for name in main.list_commands(program):
        yield f"- [`headatlas {name}`](#headatlas-{name}): {first_sentence(main.commands[name])}"
    for name in main.list_commands(program):
        yield ""
        yield f"## headatlas {name}"
        yield ""
        yield "```text"
        yield from main.commands[name].get_help(context(name, main.commands[name], program)).splitlines()
        yield "```"


def context(name: str, command: click.Command, parent: click.Context | None = None) -> click.Context:
    """A context whose help has one width on every terminal."""
    width = {"terminal_width": WIDTH, "max_content_width": WIDTH}
    return click.Context(command, parent, name, **width, **command.context_settings)


def first_sentence(command: click.Command) -> str:
    """What a command does, from its help, in one line."""
    paragraph = " ".join((command.help or "").partition("\n\n")[0].split())
    return f"{paragraph.rstrip('.')}."


if __name__ == "__main__":
    print("\n".join(lines()))
