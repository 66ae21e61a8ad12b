"""The report in headless Chromium: what a reader clicks, hovers, types and presses, against the store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest
from click.testing import CliRunner

from cli import main
from query import open_atlas
from query.report import report
from tests import checkpoints
from tests.ingesting import ingest_into
from tests.report_page import HOSTILE, hostile_model, shown_number

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH"),
    pytest.mark.xdist_group("browser"),
]

ARGUMENTS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
SCREEN = {"width": 1400, "height": 1000}


@pytest.fixture(scope="module")
def store(sealed_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama with nulls and capacities, and a model of a hostile name that has neither."""
    root = tmp_path_factory.mktemp("browser")
    store = Path(shutil.copytree(sealed_store, root / "atlas"))
    for command in (["null", "--draws", "100"], ["capacity"]):
        arguments = [*command, "llama", "--operator", "raw", "--store", str(store)]
        assert CliRunner().invoke(main, arguments).exit_code == 0
    ingest_into(store, checkpoints.save_safetensors(hostile_model(), root / "other"), HOSTILE)
    return store


@pytest.fixture(scope="module")
def heads(store: Path) -> pl.DataFrame:
    """The raw heads of llama with their capacity."""
    with open_atlas(store) as atlas:
        return atlas.sql(
            "SELECT heads.*, capacities.closure AS capacity, nulls.median AS null_median, p FROM heads "
            "JOIN capacities USING (model, operator, stack, layer, head) "
            "JOIN nulls USING (model, operator, stack, layer, head) "
            "WHERE model = 'llama' AND operator = 'raw' AND kind = 'scramble' ORDER BY layer, head"
        )


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"), executable_path=CHROMIUM, args=ARGUMENTS, viewport=SCREEN
        )
        yield context
        context.close()


@pytest.fixture(scope="module")
def address(store: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    with open_atlas(store) as atlas:
        text = report(atlas, threshold=0.02, title=HOSTILE)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(text, encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def page(browser: BrowserContext, address: str) -> Iterator[Page]:
    """The page with llama's raw heads shown; no test may leave a word on the console, nor ask a network."""
    page = browser.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    show(page, "llama, raw, decoder", 12)
    yield page
    page.close()
    assert said == []
    assert {url.split("#")[0] for url in asked if not url.startswith("data:")} == {address}


def show(page: Page, part: str, heads: int) -> None:
    """Choose a part by what begins its name in the list of models."""
    from playwright.sync_api import expect

    (index,) = [i for i, name in enumerate(texts(page, "#part option")) if name.startswith(part)]
    page.locator(f'#summary a[data-part="{index}"]').click()
    expect(page.locator("#heads tbody tr")).to_have_count(heads)
    page.wait_for_selector("#scatter canvas, #scatter p")


def texts(page: Page, selector: str) -> list[str]:
    return page.locator(selector).all_text_contents()


def cells(page: Page, selector: str) -> list[list[str]]:
    return page.locator(selector).evaluate_all("rows => rows.map(row => [...row.children].map(c => c.textContent))")


def canvas(page: Page, chart: str) -> tuple[float, float, float, float]:
    """Left, top, width and height of a chart in the middle of the window."""
    page.locator(chart).evaluate("node => node.scrollIntoView({behavior: 'instant', block: 'center'})")
    box = page.locator(f"{chart} canvas").bounding_box()
    assert box is not None
    return box["x"], box["y"], box["width"], box["height"]


def hover(page: Page, label: str) -> dict[str, str]:
    """Move over the heatmap until the tooltip names a head; the tooltip's rows."""
    left, top, width, height = canvas(page, "#heatmap")
    for row in range(7):
        for column in range(8):
            page.mouse.move(left + width * (0.12 + 0.1 * column), top + height * (0.08 + 0.13 * row))
            found = dict(cells(page, "#vg-tooltip-element.visible tr"))
            if found.get("head") == label:
                return found
    raise AssertionError(f"no cell of the heatmap is {label}")


def accent(page: Page, chart: str) -> int:
    """Pixels of a chart in the colour of what is picked."""
    return page.locator(f"{chart} canvas").evaluate(
        "c => { const copy = new OffscreenCanvas(c.width, c.height).getContext('2d', { willReadFrequently: true });"
        "copy.drawImage(c, 0, 0); const d = copy.getImageData(0, 0, c.width, c.height).data; let n = 0;"
        "for (let i = 0; i < d.length; i += 4) n += d[i] === 213 && d[i + 1] === 94 && d[i + 2] === 0; return n; }"
    )


def card_of(page: Page, label: str) -> None:
    """Wait until the card of a head is there with its pairs."""
    from playwright.sync_api import expect

    expect(page.locator("#card-title")).to_have_text(label)
    page.wait_for_selector("#pairs")


def test_a_cell_tells_its_numbers_and_opens_its_card(page: Page, heads: pl.DataFrame) -> None:
    stored = heads.row(by_predicate=pl.col("label") == "L1H2", named=True)
    before = accent(page, "#scatter")
    tooltip = hover(page, "L1H2")
    for name, column in (("closure", "closure"), ("alpha", "alpha"), ("capacity", "capacity"), ("null p", "p")):
        assert shown_number(tooltip[name]) == pytest.approx(stored[column], rel=1e-3)
    for _ in range(50):
        page.wait_for_timeout(20)
        if accent(page, "#scatter") > before + 10:
            break
    assert accent(page, "#scatter") > before + 10, "the head is not marked in the other chart"
    page.mouse.down()
    page.mouse.up()
    card_of(page, "L1H2")
    assert page.evaluate("document.activeElement.id") == "card-title"
    for column in (
        "closure",
        "alpha",
        "capacity",
        "null_median",
        "p",
        "trace_rank",
        "copying",
        "participation",
        "norm",
    ):
        (cell,) = texts(page, f'#card dd[data-column="{column}"]')
        assert shown_number(cell) == pytest.approx(stored[column], rel=1e-3), column
    assert page.locator("#card canvas").count() == 4


def test_a_card_has_the_pairs_of_its_layer(page: Page, store: Path) -> None:
    page.get_by_role("button", name="L1H2", exact=True).click()
    card_of(page, "L1H2")
    with open_atlas(store) as atlas:
        pairs = atlas.table("pairs").filter(model="llama", operator="raw", layer=1).collect()
    rows = cells(page, "#pairs tbody tr")
    assert [row[0] for row in rows] == ["H3", "H0", "H1"]
    for name, shared, mismatch, right, left in rows:
        other = int(name[1:])
        writes = pairs.row(by_predicate=(pl.col("write_head") == 2) & (pl.col("read_head") == other), named=True)
        acts = pairs.row(by_predicate=(pl.col("write_head") == other) & (pl.col("read_head") == 2), named=True)
        assert (shared == "shared") == writes["shared_value"]
        assert shown_number(right) == pytest.approx(acts["right_closure"], rel=6e-3)
        assert shown_number(left) == pytest.approx(acts["left_closure"], rel=6e-3)
        if not writes["shared_value"]:
            assert shown_number(mismatch) == pytest.approx(writes["mismatch_closure"], rel=6e-3)


def test_the_table_sorts_and_filters(page: Page, heads: pl.DataFrame) -> None:
    labels = "#heads tbody th"
    assert texts(page, labels) == heads.sort("closure", descending=True)["label"].to_list()
    alpha = page.locator("#heads th[data-column=alpha]")
    for descending, order in ((True, "descending"), (False, "ascending")):
        alpha.get_by_role("button").click()
        assert texts(page, labels) == heads.sort("alpha", descending=descending)["label"].to_list()
        assert alpha.get_attribute("aria-sort") == order
    page.fill("#filter", "L1")
    assert set(texts(page, labels)) == {"L1H0", "L1H1", "L1H2", "L1H3"}
    page.fill("#filter", "")
    least = heads["closure"].sort()[7]
    page.fill("#from", repr(least * 0.999))
    assert set(texts(page, labels)) == set(heads.filter(pl.col("closure") >= least)["label"])
    assert texts(page, "#found") == ["5 heads"]
    page.fill("#from", "")
    page.select_option("#scope", "all")
    page.fill("#filter", "bert")
    assert set(texts(page, "#heads tbody td.name")) == {"bert, raw, encoder"}


def test_a_rectangle_in_the_scatter_marks_its_heads(page: Page, heads: pl.DataFrame) -> None:
    from playwright.sync_api import expect

    left, top, width, height = canvas(page, "#scatter")
    page.mouse.move(left + 0.52 * width, top + 0.05 * height)
    page.mouse.down()
    page.mouse.move(left + 0.8 * width, top + 0.5 * height)
    page.mouse.move(left + 0.98 * width, top + 0.92 * height)
    page.mouse.up()
    expect(page.locator("#found")).to_contain_text("rectangle")
    marked = heads.filter(pl.col("label").is_in(texts(page, "#heads tbody th")))
    others = heads.filter(~pl.col("label").is_in(marked["label"]))
    assert 0 < len(marked) < len(heads)
    assert marked["capacity"].min() > others["capacity"].max()


def test_the_keyboard_reaches_every_view(page: Page) -> None:
    page.locator("#heatmap").focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert texts(page, "#status")[0].startswith("L1H1: closure ")
    page.keyboard.press("Enter")
    card_of(page, "L1H1")
    page.locator("#next").press("Enter")
    card_of(page, "L1H2")
    page.keyboard.press("Escape")
    assert page.locator("#card").is_hidden()
    page.locator("#heads button.link").first.press("Enter")
    page.wait_for_selector("#pairs")
    page.locator("#close").press("Enter")
    assert page.evaluate("document.activeElement.className") == "link"


def test_every_column_and_scale_draws(page: Page) -> None:
    for select in ("#heatmap-column", "#scatter-column"):
        for name in page.locator(f"{select} option").evaluate_all("options => options.map(o => o.value)"):
            page.select_option(select, name)
            page.wait_for_timeout(50)
    page.click("#log")
    for link in page.locator("#summary a").all():
        link.click()
        page.wait_for_timeout(50)
    page.wait_for_selector("#heatmap canvas, #heatmap p")


def test_a_hostile_name_is_only_a_name(page: Page) -> None:
    assert page.evaluate("document.title.includes('<img src=x onerror=alert(1)>')")
    assert texts(page, "h1") == [HOSTILE]
    show(page, HOSTILE, 8)
    page.get_by_role("button", name="L0H0", exact=True).click()
    card_of(page, "L0H0")
    assert HOSTILE in texts(page, "#card-part")[0]
    assert page.evaluate("document.images.length") == 0
    link = page.evaluate("location.hash")
    page.reload()
    card_of(page, "L0H0")
    assert HOSTILE in texts(page, "#card-part")[0]
    assert page.evaluate("location.hash") == link


def test_an_undefined_head_says_why(page: Page) -> None:
    show(page, HOSTILE, 8)
    for label, reason in (("L0H0", "zero"), ("L0H1", "nonfinite")):
        page.get_by_role("button", name=label, exact=True).first.click()
        card_of(page, label)
        assert texts(page, "#card .warning") == [f"Closure is undefined: {reason}."]
        page.wait_for_timeout(200)
    assert page.locator("#failure").is_hidden()


def test_it_fits_a_narrow_screen(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator("#heads button.link").first.click()
    page.wait_for_selector("#pairs")
    assert page.locator("#card").evaluate("card => card.getBoundingClientRect().width") <= 390
    assert page.locator("#card").evaluate("card => card.scrollWidth") <= 390


def test_the_policy_stops_what_would_leave_the_page(browser: BrowserContext, address: str) -> None:
    page = browser.new_page()
    page.goto(address)
    stopped = page.evaluate(
        "() => new Promise(done => { const seen = [];"
        "document.addEventListener('securitypolicyviolation', e => { seen.push(e.effectiveDirective);"
        " if (seen.length === 3) done(seen.sort()); });"
        "fetch('http://127.0.0.1:9/').catch(() => {}); new Image().src = 'http://127.0.0.1:9/x.png';"
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'})); })"
    )
    assert stopped == ["connect-src", "img-src", "script-src-elem"]
    assert page.evaluate("window.ran === undefined")
    page.close()
