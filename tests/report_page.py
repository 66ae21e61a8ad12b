"""Reading a report back: its tags, tables, embedded data and packed arrays."""

from __future__ import annotations

import base64
import gzip
import json
from html.parser import HTMLParser
from typing import Any

import numpy as np
import torch

from tests import checkpoints

HOSTILE = "<img src=x onerror=alert(1)>\"&'</script>\u2028"
"""A name that would run or break out wherever it is not escaped."""


def hostile_model() -> checkpoints.Model:
    """A checkpoint whose first two heads have no closure: one is zero, the other not finite."""
    model = checkpoints.llama(seed=5)
    name = "model.layers.0.self_attn.o_proj.weight"
    weight = model.tensors[name].clone()
    weight[:, :8] = 0
    weight[0, 8] = torch.nan
    return model.changed(**{name: weight})


class Page(HTMLParser):
    """A page as a browser would split it: tags with attributes, scripts, and cells of tables."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self.title = ""
        self._inside: list[str] = []
        self._script = self._table = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside.append(tag)
        if tag == "script":
            self._script = dict(attrs).get("id") or f"{dict(attrs).get('type')}"
            self.scripts[self._script] = ""
        elif tag == "table":
            self._table = dict(attrs)["id"] or ""
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "script" in self._inside[-1:]:
            self.scripts[self._script] += data
        elif "title" in self._inside[-1:]:
            self.title += data
        elif {"td", "th"} & set(self._inside):
            self.tables[self._table][-1][-1] += data

    @property
    def about(self) -> dict[str, Any]:
        return json.loads(self.scripts["about"])

    def attribute(self, name: str) -> list[str]:
        return [attributes[name] or "" for _, attributes in self.tags if name in attributes]

    def policy(self) -> str:
        (found,) = [
            attributes["content"] or ""
            for tag, attributes in self.tags
            if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
        ]
        return found

    def columns(self) -> dict[str, list[Any]]:
        return json.loads(gzip.decompress(base64.b64decode(self.scripts["data-heads"])))

    def arrays(self, index: int) -> dict[str, np.ndarray]:
        """Arrays of a part: spectra over the largest singular value, pairs as square roots."""
        part = self.about["parts"][index]
        packed = np.frombuffer(gzip.decompress(base64.b64decode(self.scripts[f"data-{index}"])), np.uint8)
        low, high = packed.reshape(2, -1).astype(np.uint16)
        values = (low | high << 8).view(np.float16).astype(np.float64)
        layers, heads, d_head = len(part["layers"]), part["heads"], part["d_head"]
        shapes = [("sigma", d_head), ("cosine", d_head), ("re", d_head), ("im", d_head)]
        shapes += [("mismatch", heads), ("right", heads), ("left", heads)]
        found, start = {}, 0
        for name, last in shapes:
            size = layers * heads * last
            found[name] = values[start : start + size].reshape(layers, heads, last)
            start += size
        assert start == len(values)
        return found


def shown_number(text: str) -> float:
    """A number as the page writes it."""
    digits = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻\u2212", "0123456789--", ",")
    fraction, _, power = text.translate(digits).partition(" \u00d7 10")
    return float(fraction) * 10 ** int(power or 0)
