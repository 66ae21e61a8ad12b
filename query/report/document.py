"""One HTML file that needs nothing else: template, styles, charts' library, data and policy."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from typing import Any

from query.panel import POOLED
from query.report.charts import specifications
from query.report.contents import HERE, KEY, MEANINGS, Contents, compressed, user_columns

SCRIPTS = ("data.js", "charts.js", "card.js", "table.js", "page.js")
"""Parts of the page's one script, in order."""

DASH, TIMES = "\u2013", "\u00d7"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

EXPOSED = "window.vegaEmbed = vegaEmbed;"
"""What the page needs of the charts' library."""


def inline_json(value: Any) -> str:
    """JSON that cannot end the ``<script>`` it stands in, nor a line of JavaScript."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def inline_script(text: str) -> str:
    """JavaScript that cannot end the ``<script>`` it stands in; the marks occur in strings only."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--").replace("\r", "")


def policy(*scripts: str) -> str:
    """Content security policy: these scripts, inline styles, and no connection to anywhere."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def number(value: float | None) -> str:
    """Four significant digits as the page's script writes them; a dash for none."""
    if value is None:
        return DASH
    if isinstance(value, int):
        return f"{value:,}"
    fraction, _, power = f"{value:.4g}".partition("e")
    return f"{fraction} {TIMES} 10{str(int(power)).translate(SUPERSCRIPTS)}" if power else fraction


def percent(value: float | None) -> str:
    """A share as per cent."""
    return DASH if value is None else f"{value:.2%}"


@cache
def library() -> str:
    """The charts' library in one piece; putting it together takes a second."""
    import vl_convert

    return inline_script(vl_convert.javascript_bundle(EXPOSED))


def render(shown: Contents, title: str) -> str:
    """The whole page as HTML."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    columns = shown.columns()
    filled = {name for name, values in columns.items() if any(value is not None for value in values)}
    extra = user_columns(shown.heads)
    about = {
        "threshold": shown.threshold,
        "parts": [part.facts for part in shown.parts],
        "meanings": MEANINGS,
        "filled": sorted(filled),
        "extra": extra,
        "charts": specifications(filled, {name: name for name in extra}, shown.threshold),
    }
    script = inline_script("".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "percent": percent}
    template = environment.from_string((HERE / "page.html").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        policy=Markup(policy(library(), script)),  # noqa: S704 - made here of hashes
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),  # noqa: S704 - the project's own file
        origin=shown.provenance,
        store=shown.store,
        threshold=f"{shown.threshold:g}",
        n_heads=shown.heads.select(KEY[0], *KEY[2:], "layer", "head").n_unique(),
        summary=shown.summary.to_dicts(),
        claims=shown.claims.to_dicts(),
        several=shown.claims["model"].n_unique() > 1,
        pooled=POOLED,
        about=Markup(inline_json(about)),  # noqa: S704 - escaped by inline_json
        heads=base64.b64encode(compressed(columns)).decode(),
        parts=[base64.b64encode(part.packed).decode() for part in shown.parts],
        library=Markup(library()),  # noqa: S704 - a library, and hashed in the policy
        script=Markup(script),  # noqa: S704 - the project's own files, and hashed in the policy
    )
