"""An SQL prompt on a store: statements and commands from a terminal or a stream, rows out."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.lexers import PygmentsLexer
from pygments.lexers.sql import SqlLexer

from query import questions
from query.atlas import open_atlas
from query.completion import StoreCompleter, Vocabulary, vocabulary
from query.formats import BINARY, ENDINGS, FORMATS, Format
from query.output import deliver, encode
from query.parameters import split as named_value
from query.statements import split
from stats.errors import HeadatlasError, QueryError, nearest
from store.atlas import AtlasStore
from store.version import tool_version

if TYPE_CHECKING:
    import polars as pl

HELP = {
    ".help": ("", "these commands"),
    ".tables": ("", "tables and macros with their meaning"),
    ".schema": ("TABLE", "columns of a table with their meaning"),
    ".questions": ("", "questions that have a name, with their parameters"),
    ".ask": ("NAME ...", "ask one of them; PARAMETER=VALUE after its name"),
    ".format": ("FORM", f"form of the rows from here on: {', '.join(FORMATS)}"),
    ".output": ("FILE", "write the next answer to FILE, in the form its ending names"),
    ".pager": ("on|off", "show what does not fit the screen in $PAGER, else less"),
    ".timer": ("on|off", "say how long each answer took"),
    ".quit": ("", "leave, as Ctrl-D does"),
}


class Leave(Exception):  # noqa: N818  # a request, not an error
    """Ends the prompt."""


class Shell:
    """What answers statements and commands, wherever they are read from.

    It asks the store as it is now: a catalogue published since the last answer is opened first.

    Args:
        root: the store.
        terminal: rows are for a person, who can page through them and be told how many there are.
    """

    def __init__(self, root: Path, terminal: bool) -> None:
        self.root = root
        self.terminal = terminal
        self.style: Format = "table"
        self.output: Path | None = None
        self.pager = True
        self.timer = False
        self._published = self._stamp()
        self.atlas = open_atlas(root)
        self._words: Vocabulary | None = None
        self.commands: dict[str, Callable[[str], None]] = {
            ".help": self._help,
            ".tables": self._tables,
            ".schema": self._schema,
            ".questions": self._questions,
            ".ask": self._ask,
            ".format": self._format,
            ".output": self._output,
            ".pager": self._pager,
            ".timer": self._timer,
            ".quit": self._quit,
        }

    def close(self) -> None:
        """Release the catalogue."""
        self.atlas.close()

    def words(self) -> Vocabulary:
        """What can be named, read once for each state of the store."""
        if self._words is None:
            self._words = vocabulary(self.atlas)
        return self._words

    def arguments(self) -> dict[str, Callable[[], Iterable[str]]]:
        """What can follow each command, for completion."""
        known: dict[str, Callable[[], Iterable[str]]] = dict.fromkeys(self.commands, list)
        switch: Callable[[], Iterable[str]] = lambda: ("on", "off")  # noqa: E731
        return known | {
            ".schema": lambda: self.words().tables,
            ".ask": lambda: self.atlas.questions()["name"],
            ".format": lambda: FORMATS,
            ".pager": switch,
            ".timer": switch,
        }

    def run(self, text: str) -> bool:
        """Run a command, or every statement of a text; says errors, and whether there were none.

        Raises:
            Leave: asked to.
        """
        try:
            if text.lstrip().startswith("."):
                name, _, argument = text.strip().partition(" ")
                if name not in self.commands:
                    raise QueryError(
                        f"no command {name}", remedy=nearest(name, self.commands) or ".help lists the commands"
                    )
                self.commands[name](argument.strip())
            else:
                finished, rest = split(text)
                for statement in [*finished, rest] if rest else finished:
                    self._answer(partial(self._sql, statement))
        except HeadatlasError as error:
            click.echo(f"error: {error}", err=True)
            return False
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            return False
        return True

    def _sql(self, statement: str) -> pl.DataFrame:
        return self.atlas.sql(statement)

    def _answer(self, ask: Callable[[], pl.DataFrame]) -> None:
        """Ask, and show the rows or write them; for a person also how many there are."""
        self._refresh()
        started = time.perf_counter()
        frame = ask()
        seconds = time.perf_counter() - started
        if self.output is not None:
            output, self.output = self.output, None
            style = next((form for form in FORMATS if form == ENDINGS.get(output.suffix.lower())), self.style)
            deliver(frame, style, output)
            click.echo(f"written to {output}", err=True)
        elif not self.terminal or self.style in BINARY:
            deliver(frame, self.style, None)
        else:
            text = encode(frame, self.style).decode()
            if self.pager and not _fits(text):
                click.echo_via_pager(text)
            else:
                click.echo(text, nl=False)
        if self.timer or self.terminal:
            rows = f"{len(frame):,} {'row' if len(frame) == 1 else 'rows'}"
            click.echo(f"{rows}, {seconds:.3f} s" if self.timer else rows, err=True)

    def _refresh(self) -> None:
        """Open the catalogue again if another process has published one."""
        published = self._stamp()
        if published != self._published:
            fresh = open_atlas(self.root)
            self.atlas.close()
            self.atlas, self._published, self._words = fresh, published, None

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = AtlasStore.open(self.root).catalogue_path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _help(self, _argument: str) -> None:
        for name, (argument, meaning) in HELP.items():
            click.echo(f"{name} {argument}".ljust(16) + meaning)
        click.echo("Anything else is SQL, which a semicolon ends.")

    def _tables(self, _argument: str) -> None:
        self._answer(lambda: self.atlas.ask(questions.SCHEMA_TABLES))

    def _questions(self, _argument: str) -> None:
        self._answer(lambda: self.atlas.questions())

    def _ask(self, argument: str) -> None:
        try:
            name, *given = shlex.split(argument)
        except ValueError as error:
            raise QueryError("no question named", expected=".ask NAME [PARAMETER=VALUE ...]") from error
        values = dict(map(named_value, given))
        self._answer(lambda: self.atlas.ask(name, **values))

    def _schema(self, argument: str) -> None:
        self._refresh()
        if argument not in self.words().tables:
            known = self.words().tables
            raise QueryError(
                f"no table named {argument!r}" if argument else "no table named",
                expected="one of " + ", ".join(known),
                remedy=nearest(argument, known),
            )
        self._answer(lambda: self.atlas.ask(questions.table_schema(argument)))

    def _format(self, argument: str) -> None:
        if not argument:
            click.echo(self.style)
        elif argument in FORMATS:
            self.style = argument
        else:
            raise QueryError(f"no format {argument!r}", expected="one of " + ", ".join(FORMATS))

    def _output(self, argument: str) -> None:
        if not argument:
            raise QueryError("no file named", expected=".output FILE")
        self.output = Path(argument).expanduser()

    def _pager(self, argument: str) -> None:
        self.pager = _switched(".pager", argument)

    def _timer(self, argument: str) -> None:
        self.timer = _switched(".timer", argument)

    def _quit(self, _argument: str) -> None:
        raise Leave


def _switched(command: str, argument: str) -> bool:
    if argument not in ("on", "off"):
        raise QueryError(f"{command} is switched on or off", expected=f"{command} on, or {command} off")
    return argument == "on"


def _fits(text: str) -> bool:
    """Whether a text fits the terminal as it is, with the next prompt below it."""
    width, height = os.get_terminal_size() if sys.stdout.isatty() else (80, 24)
    lines = text.splitlines()
    return len(lines) + 2 <= height and max(map(len, lines), default=0) <= width


def history_path() -> Path:
    """Where statements are kept from one prompt to the next, in the user's state directory as XDG has it."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "headatlas" / "history"


def _history(path: Path) -> History:
    """The history file, or a history of this prompt alone where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.open("ab").close()
    except OSError as error:
        click.echo(f"history is not kept: {path}: {error.strerror}", err=True)
        return InMemoryHistory()
    return FileHistory(str(path))


def _finished(text: str) -> bool:
    """Whether Enter runs a text: a command, statements that all end, or nothing at all."""
    finished, rest = split(text)
    return not text.strip() or text.lstrip().startswith(".") or bool(finished and not rest)


def prompt_session(shell: Shell, **terminal: Any) -> PromptSession[str]:
    """The prompt: history, completion and highlighting; ``terminal`` may name another ``input`` and ``output``."""
    return PromptSession(
        "atlas> ",
        multiline=Condition(lambda: not _finished(get_app().current_buffer.text)),
        prompt_continuation=lambda width, _line, _wrap: " " * (width - 2) + "> ",
        lexer=PygmentsLexer(SqlLexer),
        completer=StoreCompleter(shell.words, shell.arguments()),
        history=_history(history_path()),
        **terminal,
    )


def from_terminal(root: Path, **terminal: Any) -> None:
    """Prompt until Ctrl-D or ``.quit``.

    Raises:
        StoreError: no store there.
    """
    # Chopped lines scroll sideways, the answer stays on the screen when the pager is left, and it says how to leave.
    os.environ.setdefault("LESS", "-RSX -Psarrows scroll, q goes back$")
    shell = Shell(root, terminal=True)
    try:
        session = prompt_session(shell, **terminal)
        click.echo(f"Headatlas {tool_version()}, {root}. SQL ends with a semicolon; .help lists commands.", err=True)
        while True:
            try:
                shell.run(session.prompt())
            except KeyboardInterrupt:
                continue
            except (EOFError, Leave):
                return
    finally:
        shell.close()


def from_stream(root: Path, stream: TextIO) -> bool:
    """Run what a stream holds, a statement or command at a time; whether all of it could be run.

    Raises:
        StoreError: no store there.
    """
    shell = Shell(root, terminal=False)
    sound, waiting = True, ""
    try:
        for line in stream:
            if not waiting.strip() and line.lstrip().startswith("."):
                sound &= shell.run(line)
                continue
            finished, waiting = split(waiting + line)
            for statement in finished:
                sound &= shell.run(statement)
            waiting += "\n" if waiting else ""
        if waiting.strip():
            sound &= shell.run(waiting)
    except Leave:
        pass
    finally:
        shell.close()
    return sound
