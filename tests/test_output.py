"""Frames as text and files: what another program reads back, and what a cell may not break."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pandas
import polars as pl
import pyarrow.feather
import pytest

from query.commands import options
from query.formats import ENDINGS, EXPORT_FORMATS, FORMATS
from query.output import deliver, encode
from query.typesetting import significant
from stats.errors import QueryError

AWKWARD = ["a|b", "a\nb", "#first", 'quote"d, comma', r"back\slash_", "100%_odd & name", "", None]
FRAME = pl.DataFrame({"#name": AWKWARD, "value": [0.5, None, -1e-5, 1e7, 0.0, 12345.678, 2.0, 1 / 3]})


def test_the_command_line_knows_the_same_formats() -> None:
    assert options.FORMATS is FORMATS
    assert set(ENDINGS.values()) == set(EXPORT_FORMATS) - {"table"}


def test_csv_survives_readers_that_take_a_hash_for_a_comment() -> None:
    text = encode(FRAME, "csv")
    marked = b'# a comment, with "quotes"\n' + text
    for read in (
        pl.read_csv(marked, comment_prefix="#"),
        pl.from_pandas(pandas.read_csv(io.BytesIO(marked), comment="#")),
    ):
        assert read.columns == FRAME.columns
        assert read["#name"].to_list()[:6] == AWKWARD[:6]
        assert read["value"].to_list() == pytest.approx(FRAME["value"].to_list())
    assert list(csv.reader(io.StringIO(text.decode())))[3][0] == "#first"


def test_csv_is_quoted_only_where_it_must_be() -> None:
    assert encode(pl.DataFrame({"model": ["a"], "n": [1]}), "csv") == b"model,n\na,1\n"


def test_arrow_is_feather_and_has_metadata(tmp_path: Path) -> None:
    frame = FRAME.with_columns(spectrum=pl.Series([[1.0], None, [], [2.0, 3.0], None, None, None, None]))
    path = tmp_path / "rows.feather"
    path.write_bytes(encode(frame, "arrow", {"key": "värde"}))
    table = pyarrow.feather.read_table(path)
    assert table.schema.metadata == {b"key": "värde".encode()}
    assert table.to_pydict() == frame.to_dict(as_series=False)
    assert pl.read_ipc(path.read_bytes()).equals(frame)


def test_parquet_has_metadata() -> None:
    data = encode(FRAME, "parquet", {"key": "värde"})
    assert pl.read_parquet_metadata(io.BytesIO(data))["key"] == "värde"
    assert pl.read_parquet(data).equals(FRAME)


def test_markdown_has_one_line_a_row_and_as_many_cells() -> None:
    lines = encode(FRAME, "markdown").decode().splitlines()
    assert len(lines) == 2 + FRAME.height
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3}
    assert {len(line) for line in lines} == {len(lines[0])}
    assert r"a\|b" in lines[2]
    assert lines[3].startswith("| a b")


def test_latex_aligns_numbers_and_escapes_names() -> None:
    text = encode(FRAME, "latex").decode()
    assert r"\begin{tabular}{@{}lS[table-format=-5.4e-1,group-digits=integer,table-align-exponent=false]@{}}" in text
    assert r"100\%\_odd \& name & 12346 \\" in text
    assert r"\#first & -1.000e-5 \\" in text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.26521, 3, "0.265"),
        (0.2, 3, "0.200"),
        (0.00032800, 3, "3.28e-4"),
        (0.00999999, 3, "0.0100"),
        (0.00099999, 3, "0.00100"),
        (-19.39, 3, "-19.4"),
        (123456.0, 3, "123456"),
        (999999.6, 3, "1.00e6"),
        (1.5e12, 2, "1.5e12"),
        (0.0, 3, "0"),
        (float("inf"), 3, "inf"),
        (0.95, 1, "0.9"),
    ],
)
def test_significant_digits(value: float, digits: int, text: str) -> None:
    assert significant(value, digits) == text


@pytest.mark.parametrize("style", ["parquet", "arrow"])
def test_binary_forms_do_not_go_to_a_terminal(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    with pytest.raises(QueryError, match=f"{style} is not text"):
        deliver(FRAME, style, None)
