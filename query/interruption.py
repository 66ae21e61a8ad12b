"""Work on a connection that can be stopped: by Ctrl-C, after a time, or when its answer fills the memory."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import duckdb

from stats.errors import QueryError

ANSWER_LIMIT_GIB = 8.0
"""Memory of the process that a question may add, DuckDB's own share included."""
LOOK_SECONDS = 0.1
"""How often time and memory are looked at; what is done earlier is answered at once."""

Answer = TypeVar("Answer")


def stoppable(
    connection: duckdb.DuckDBPyConnection, work: Callable[[], Answer], timeout: float | None = None
) -> Answer:
    """What ``work`` returns, which runs on the connection in a thread of its own.

    Args:
        connection: what is interrupted when the work has to stop.
        work: has nobody else use the connection meanwhile.
        timeout: seconds after which it is stopped; never when None.

    Raises:
        QueryError: stopped after ``timeout``, or because its answer takes too much memory.
        KeyboardInterrupt: stopped by the user; the connection is free again.
    """
    answers: list[Answer] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def call() -> None:
        try:
            answers.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    before, started = _peak_gib(), time.monotonic()
    threading.Thread(target=call, daemon=True).start()
    stopped: QueryError | None = None
    try:
        while not done.wait(LOOK_SECONDS if timeout is None else min(LOOK_SECONDS, timeout)):
            if timeout is not None and time.monotonic() - started >= timeout:
                stopped = QueryError(
                    "the query was stopped after its time",
                    expected=f"an answer within {timeout:g} seconds",
                    remedy="ask for less, or give it longer with --timeout SECONDS",
                )
            elif _peak_gib() - before > ANSWER_LIMIT_GIB:
                stopped = QueryError(
                    "the query was stopped because its answer takes too much memory",
                    expected=f"less than {ANSWER_LIMIT_GIB:g} GiB",
                    remedy="ask for fewer rows or columns, or aggregate them",
                )
            if stopped is not None:
                _stop(connection, done)
    except KeyboardInterrupt:
        _stop(connection, done)
        raise
    if stopped is not None and not answers:
        raise stopped
    if errors:
        raise errors[0]
    return answers[0]


def _stop(connection: duckdb.DuckDBPyConnection, done: threading.Event) -> None:
    """Interrupt until the work has ended: what was about to start is not interrupted by the first call."""
    while not done.wait(LOOK_SECONDS):
        connection.interrupt()


def _peak_gib() -> float:
    """The largest resident memory of this process so far; 0 where the platform does not tell."""
    try:
        import resource
    except ImportError:
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)
