"""The page in a real browser: its colors, its keys, its widths, and text that tries to be more than text."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from pages import random_weights, self_map, served, trained, view_of

from manyformer.analysis.figures.attention_maps import NO_WEIGHT_COLOR, WEIGHT_COLORS, AttentionMap
from manyformer.analysis.figures.token_work import TokenCounts
from manyformer.analysis.viewer.model_view import ModelView, ViewedImage, quantize_weights, view_text
from manyformer.analysis.viewer.page import render_page
from manyformer.analysis.viewer.server import ServedModel

CHROMIUM = Path("/usr/bin/chromium")
Open = Callable[..., Any]

LIGHT, DARK = {"first": (247, 249, 227), "last": (59, 6, 80)}, {"first": (37, 28, 64), "last": (253, 231, 37)}
"""The first and the last color of the ramps of page.js, which show the smallest and the largest weight."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install 'manyformer[test]'")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is missing: apt-get install --no-install-recommends chromium")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-background-networking"]
        )
        yield launched
        launched.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens the page of some views from disk; afterwards nothing was requested and nothing went wrong."""
    problems: list[str] = []

    def open_page(*views: ModelView, text: str = "", width: int = 1200, theme: str = "light") -> Any:
        file = tmp_path / "page.html"
        file.write_text(render_page(views, text=text), encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=theme)
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: None if request.url == file.as_uri() else problems.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector(".run")
        return page

    yield open_page
    assert problems == []


def color_at(page: Any, query: int, key: int) -> tuple[int, ...]:
    """The color of the middle of a cell on the screen."""
    from PIL import Image

    page.evaluate(f"select({{query: {query}, key: {key}}}, true)")
    row, column = (node.bounding_box() for node in page.query_selector_all(".band"))
    clip = {"x": column["x"] + column["width"] / 2, "y": row["y"] + row["height"] / 2, "width": 1, "height": 1}
    pixel = Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB").getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return pixel


def close_to(color: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return max(abs(a - b) for a, b in zip(color, expected)) <= 3


@pytest.mark.parametrize(("theme", "ramp"), [("light", LIGHT), ("dark", DARK)])
def test_the_largest_weight_of_a_row_the_smallest_and_none_have_their_colors(
    show: Open, theme: str, ramp: dict[str, tuple[int, ...]]
) -> None:
    weights = torch.tensor([[[1.0, 0.0, 0.0], [0.998, 0.002, 0.0], [0.2, 0.4, 0.4]]])
    page = show(view_of(self_map(weights)), theme=theme)
    assert close_to(color_at(page, 2, 1), ramp["last"])
    assert close_to(color_at(page, 1, 1), ramp["first"])
    blank = page.evaluate("getComputedStyle(document.querySelector('.swatch')).backgroundColor")
    assert color_at(page, 0, 2) == tuple(json.loads(blank.replace("rgb(", "[").replace(")", "]")))
    # from 0 to 1 the same weight is no longer the darkest
    page.keyboard.press("s")
    assert close_to(color_at(page, 0, 0), ramp["last"])
    assert not close_to(color_at(page, 2, 1), ramp["last"])


def test_the_browser_reads_the_weights_that_were_written(show: Open) -> None:
    positive, signed = random_weights(2, 9), random_weights(3, 5) - 0.2
    page = show(view_of(self_map(positive, part="body.0.a"), self_map(signed, part="body.1.a")))
    for index, weights in enumerate((positive, signed)):
        scales, levels = quantize_weights(weights)
        expected = (levels - levels.sign() / 2) / 126.5 * scales[..., None]
        for head in range(len(weights)):
            read = page.evaluate(f"[...panels[0].maps[{index}].read({head}).weights]")
            torch.testing.assert_close(torch.tensor(read), expected[head].flatten(), rtol=1e-6, atol=1e-7)
        mean = page.evaluate(f"[...panels[0].maps[{index}].read(-1).weights]")
        torch.testing.assert_close(torch.tensor(mean), expected.mean(0).flatten(), rtol=1e-5, atol=1e-6)


def test_the_page_and_the_pictures_have_the_same_colors(show: Open) -> None:
    page = show(view_of(self_map(random_weights(1, 3))))
    assert page.evaluate("COLORS.light") == list(WEIGHT_COLORS)
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--blank')") == NO_WEIGHT_COLOR


def test_a_text_that_looks_like_markup_is_shown_as_text(show: Open) -> None:
    hostile = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"
    model = trained("transformer-lm")
    tokens = ("\u200f", "\u202e", "\x00", "<b>", hostile, "{{data}}")
    view = view_text(model, "ab\ncd", name=hostile)
    page = show(view, view_of(self_map(random_weights(1, 6), tokens), name="{{script}}"), text=hostile)
    for key in "vv":
        page.keyboard.press(key)
    assert page.evaluate("window.broken") is None
    assert page.query_selector("#runs img, #runs b b") is None
    assert page.inner_text("#text") == hostile
    assert page.inner_text("h2").startswith(hostile)
    assert [node.inner_text() for node in page.query_selector_all(".run:last-child .chip")][3:] == list(tokens[3:])
    # the line break of the first text is visible
    assert "↵" in page.inner_text(".run:first-child .view")


def test_every_choice_has_a_key(show: Open) -> None:
    maps = [self_map(random_weights(3, 6), part=f"body.{layer}.attention") for layer in range(2)]
    page = show(view_of(*maps))

    def state_after(keys: str) -> tuple[Any, ...]:
        for key in keys.split():
            page.keyboard.press(key)
        return tuple(page.evaluate("[panels[0].map.name, panels[0].head, selection.query, selection.key]"))

    assert state_after("") == ("body.1.attention", -1, 0, -1)
    assert state_after("l l l l l k k k") == ("body.0.attention", 2, 0, -1)
    assert state_after("ArrowDown ArrowDown ArrowRight ArrowRight j h") == ("body.1.attention", 1, 2, 1)
    assert page.inner_text(".title h3") == "body.1.attention · head 1"
    assert page.inner_text(".readout").startswith("token2 (2) → token1 (1): ")
    assert page.get_attribute(".thumb[aria-pressed=true]", "title") == "body.1.attention, head 1"
    assert state_after("m") == ("body.1.attention", -1, 2, 1)
    for view in ("lines", "tokens", "map"):
        page.keyboard.press("v")
        assert page.get_attribute("[data-choice=view][aria-pressed=true]", "data-value") == view
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("?")
    assert page.is_visible("#help")


def test_the_pointer_selects_a_row_and_a_column(show: Open) -> None:
    page = show(view_of(self_map(random_weights(1, 6))))
    page.evaluate("select({query: 4, key: 1}, true)")
    row, column = (node.bounding_box() for node in page.query_selector_all(".band"))
    page.evaluate("select({query: 0, key: -1}, true)")
    page.mouse.move(column["x"] + column["width"] / 2, row["y"] + row["height"] / 2)
    assert page.inner_text(".readout").startswith("token4 (4) → token1 (1): ")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_shows_every_view_without_scrolling_sideways(show: Open, theme: str) -> None:
    labels = tuple(f"longer token {number}" for number in range(40))
    counts = TokenCounts("body: steps", labels, tuple([2.0] * 40), 3.0, halting=((0.1, 0.9),) * 40)
    view = view_of(
        *(self_map(random_weights(12, 40), labels, f"body.{n}.attention") for n in range(2)), counts=[counts]
    )
    page = show(view, text="a long text " * 40, width=360, theme=theme)
    for _ in range(3):
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        page.keyboard.press("v")


def test_two_runs_stand_side_by_side_and_follow_each_other(show: Open) -> None:
    views = [view_of(self_map(random_weights(2, 5)), name=name) for name in ("one", "two")]
    page = show(*views)
    left, right = (node.bounding_box() for node in page.query_selector_all(".run"))
    assert (left["y"], left["x"] + left["width"] <= right["x"]) == (right["y"], True)
    page.keyboard.press("l")
    assert [node.inner_text() for node in page.query_selector_all(".title h3")] == ["body.0.attention · head 0"] * 2


def test_the_steps_of_a_translation_are_shown_with_their_source(show: Open) -> None:
    weights = torch.tensor([[[0.9, 0.1, 0.0], [0.2, 0.3, 0.5]]])
    cross = AttentionMap("decoder.0.cross", ("ja", "<eos>"), ("yes", "sir", "<eos>"), weights, "source")
    page = show(view_of(cross))
    page.keyboard.press("v")
    page.keyboard.press("v")
    page.locator("input[type=range]").fill("1")
    assert page.inner_text(".steps span") == "2 of 2"
    assert page.inner_text(".top li").split() == ["<eos>", "50%"]
    target, source = page.query_selector_all(".chips")
    assert [len(line.query_selector_all(".chip")) for line in (target, source)] == [2, 3]


def test_steps_until_a_token_halts_are_bars(show: Open) -> None:
    view = view_text(trained("universal-transformer-lm", depth=3), "abc")
    page = show(view)
    assert [attention_map.part for attention_map in view.maps] == [
        f"body.block.attention, step {number}" for number in range(1, 1 + len(view.maps))
    ]
    bars = page.query_selector_all(".counts .stack")
    assert [len(bar.query_selector_all("i")) for bar in bars] == list(view.counts[0].numbers)


def test_long_texts_are_drawn_and_followed(show: Open) -> None:
    page = show(view_of(self_map(random_weights(2, 512, causal=True))))
    page.mouse.move(700, 500)
    assert page.evaluate("selection.query > 0 && selection.key >= 0")
    page.keyboard.press("v")
    assert "at most 64 tokens" in page.inner_text(".view")


def test_a_page_of_16_heads_and_48_tokens_is_small() -> None:
    torch.manual_seed(1)
    # as concentrated as trained heads are; weights without any pattern cannot be compressed
    scores = torch.randn(4, 4, 48, 48) * 2
    views = [view_of(*(self_map(scores[n].softmax(-1), part=f"body.{n}.attention") for n in range(4)))]
    assert len(render_page(views).encode()) <= 60_000


def test_a_served_page_takes_other_texts_and_switches_heads_off(browser: Any) -> None:
    with served(ServedModel("run", trained("transformer-lm"))) as server:
        page, problems = browser.new_page(), list[str]()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(server.url)
        page.wait_for_selector(".thumb")
        assert page.query_selector(".thumb.off") is None
        page.keyboard.press("l")
        page.keyboard.press("x")
        page.wait_for_selector(".thumb.off")
        page.locator(".counts", has_text="with all heads").wait_for()
        page.fill("textarea", "hhh")
        page.click("form button")
        page.locator("#text", has_text="hhh").wait_for()
        assert page.evaluate("panels[0].map.rowTokens.join('')") == "<bos>hhh"
        # what was switched off stays so for the next text
        page.wait_for_selector(".thumb.off")
        page.close()
    assert problems == []


def test_a_patch_shows_what_it_attends_to(show: Open) -> None:
    pixels = np.zeros((8, 8, 1), dtype=np.uint8)
    corners = (None, (0, 0), (0, 4), (4, 0), (4, 4))
    weights = torch.full((1, 5, 5), 0.1)
    weights[0, 2, 3] = 0.6
    page = show(view_of(self_map(weights), image=ViewedImage(pixels, corners, 4)))
    assert page.get_attribute("[data-choice=view][aria-pressed=true]", "data-value") == "image"
    box = page.query_selector(".view canvas").bounding_box()
    # the second patch of the first row, in the left one of two pictures
    page.mouse.move(box["x"] + 300, box["y"] + 50)
    assert page.evaluate("[selection.query, selection.key]") == [2, -1]
    assert page.inner_text(".top li:first-child").split() == ["token3", "60%"]
    page.keyboard.press("v")
    assert page.get_attribute("[data-choice=view][aria-pressed=true]", "data-value") == "map"


def test_the_page_opens_on_the_head_whose_tokens_attend_to_another_token(show: Open) -> None:
    length = 12
    rest = torch.zeros(length, length)
    rest[:, 0] = 1.0
    own = torch.eye(length)
    previous = torch.full((length, length), 0.02).tril()
    previous[range(1, length), range(length - 1)] = 0.8
    previous[9, 4] = 0.95
    heads = [
        self_map(torch.stack([rest, own, previous]), part="body.0.a"),
        self_map(torch.stack([rest, own]), part="body.1.a"),
    ]
    page = show(view_of(*heads))
    assert page.evaluate("[panels[0].map.name, panels[0].head, selection.query, selection.key]") == [
        "body.0.a",
        2,
        9,
        4,
    ]
    assert page.inner_text(".readout").startswith("token9 (9) → token4 (4): 95%")
    assert "The page opens on this head" in page.inner_text(".note")
    page.keyboard.press("h")
    assert "The page opens on this head" not in page.inner_text(".note")


def test_the_map_takes_the_height_of_the_window_and_thumbnails_show_their_pattern(show: Open) -> None:
    page = show(view_of(self_map(random_weights(4, 24, causal=True))), width=1280)
    box = page.query_selector(".view canvas").bounding_box()
    # beside it are only the overview and the list of keys, and the header above
    assert box["height"] > 0.65 * 800
    assert box["width"] > 0.4 * 1280
    thumbs = page.query_selector_all(".thumb")
    assert all(thumb.bounding_box()["width"] >= 48 for thumb in thumbs)
    # a pixel a cell
    assert thumbs[1].query_selector("canvas").get_property("width").json_value() == 24


def test_the_map_is_saved_as_a_drawing_and_as_pixels(show: Open, tmp_path: Path) -> None:
    from PIL import Image

    hostile = ("<b>&", "\x00\ud800", "c")
    page = show(
        view_of(self_map(torch.tensor([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]]), hostile)), theme="dark"
    )
    saved = {}
    for kind in ("SVG", "PNG"):
        with page.expect_download() as download:
            page.get_by_label(f"Save the map as {kind}").click()
        saved[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(saved[kind])
    drawing = ElementTree.parse(saved["SVG"]).getroot()
    assert saved["SVG"].name == "body.0.attention-head-0.svg"
    texts = [node.text for node in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "body.0.attention, head 0"
    assert texts[1:4] == texts[4:7] == ["<b>&", "\ufffd\ufffd", "c"]
    # on white, whatever the screen is: the darkest color is the largest weight
    fills = [node.get("fill") for node in drawing.iter("{http://www.w3.org/2000/svg}rect")]
    assert fills[0] == "#ffffff"
    assert fills.count(f"rgb({','.join(map(str, LIGHT['last']))})") >= 4
    pixels = Image.open(saved["PNG"])
    assert pixels.size == tuple(2 * int(float(drawing.get(side))) for side in ("width", "height"))
    assert pixels.convert("RGB").getpixel((2, 2)) == (255, 255, 255)
