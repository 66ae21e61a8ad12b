"""Help: every command shows an example, and the documents know every command."""

from __future__ import annotations

import re
import shlex
from importlib.util import module_from_spec, spec_from_file_location

import click
import pytest

from cli import main
from tests.printed import ROOT

DOCUMENTS = "\n".join(path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
COMMANDS = sorted(main.commands)


def examples(command: click.Command) -> list[str]:
    """Lines of a help text that call the command."""
    return re.findall(rf"^\s*(?:\S+ \| )?(headatlas {command.name}\b.*)$", command.help or "", re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_the_command_takes(name: str) -> None:
    command = main.commands[name]
    found = examples(command)
    assert found, f"headatlas {name} --help shows no example"
    options = {option for parameter in command.params for option in parameter.opts}
    for example in found:
        used = {word.partition("=")[0] for word in shlex.split(example, comments=True) if re.match("--?[a-z]", word)}
        assert used <= options, example


@pytest.mark.parametrize("name", COMMANDS)
def test_a_document_names_the_command(name: str) -> None:
    written = DOCUMENTS.replace((ROOT / "docs" / "commands.md").read_text(), "")
    assert re.search(rf"\bheadatlas {name}\b", written), f"neither README.md nor a text in docs/ has headatlas {name}"


def test_the_reference_of_commands_is_up_to_date() -> None:
    spec = spec_from_file_location("make_commands", ROOT / "docs" / "make_commands.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "commands.md").read_text() == "\n".join(module.lines()) + "\n"
