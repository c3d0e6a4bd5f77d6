"""The page, the badge and the JSON of a report: whole, valid, self-contained, and text stays text."""

import dataclasses
import io
import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from manyformer.analysis.contracts import CheckReport, ContractRow
from manyformer.analysis.contracts.check_report import CheckLengths
from manyformer.analysis.contracts.command import CheckRequest, CommandFace, run_checks, wrapped_report
from manyformer.analysis.contracts.leak_place import DependenceMatrix, LeakPlace
from manyformer.analysis.contracts.report_page import matrix_svg
from manyformer.base.errors import UserError

CHROMIUM = Path("/usr/bin/chromium")
SCHEMA = Path(__file__).parents[3] / "docs" / "_static" / "check-report.schema.json"
HOSTILE = '</style><script>alert("1")</script>&<b>'

MATRIX = DependenceMatrix(
    (
        (True, False, False, False),
        (True, True, False, True),
        (False, True, True, False),
        (True, True, True, True),
    )
)
PLACE = LeakPlace(
    kind="later tokens",
    output=1,
    token=3,
    size=0.5,
    relative_size=0.25,
    module="blocks.1.attn",
    module_class="Attention",
    after="qkv",
    before="proj",
    file="model.py",
    line=12,
    code="w = w.softmax(-1)",
    layers=("blocks.1.attn",),
    layer_count=3,
    length=4,
    tokens=((5, 2, 7, 1),),
    exchanged=((5, 2, 7, 3),),
    matrix=MATRIX,
)


def report(name: str = "Net", place: LeakPlace | None = PLACE, sentence: str = "the future leaks") -> CheckReport:
    rows = (
        ContractRow("causal", "failed", sentence, 0.5, 0.0, place),
        ContractRow("batch", "passed", "each row alone", 0.0, 1e-9),
        ContractRow("float64", "failed", "not finite", math.nan, 1e-4),
        ContractRow("cached", "not promised", "not promised: no cache"),
    )
    return CheckReport(name, rows, CheckLengths(48, 64), 7, ("called as f(x)", "vocabulary 29"))


KEPT = CheckReport("Net", report().rows[1:2], CheckLengths(48, 64), 0)


class Page(HTMLParser):
    """Reads a page strictly: elements must be closed in order, and ids and attributes given once."""

    EMPTY = frozenset({"meta", "rect", "path"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data


def test_the_page_tells_all_that_the_report_has() -> None:
    page = Page(report().to_html(command="manyformer check net.py:Net --seed 7"))
    for part in (
        "Net: 2 broken",
        "called as f(x)",
        "vocabulary 29",
        "in the forward of blocks.1.attn (Attention), after qkv, before proj",
        "model.py:12: w = w.softmax(-1)",
        "in 1 of 3 Attention",
        "tokens = torch.tensor([[5, 2, 7, 1]])",
        "not promised: no cache",
        "manyformer check net.py:Net --seed 7",
        "torch ",
        "seed 7",
    ):
        assert part in page.text, part


def test_text_of_a_model_never_becomes_part_of_the_page() -> None:
    plain_place = LeakPlace(kind="later tokens", output=1, token=2, module="a", module_class="b")
    hostile_place = dataclasses.replace(plain_place, module=HOSTILE, module_class=HOSTILE)
    plain = Page(report(place=plain_place).to_html())
    page = Page(report(HOSTILE, hostile_place, HOSTILE).to_html(command=HOSTILE))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
    assert page.text.count(HOSTILE) >= 5


def test_the_page_needs_nothing_else() -> None:
    text = report().to_html()
    page = Page(text)
    assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe", "object"}
    assert not [name for _, attributes in page.elements for name in attributes if name in ("src", "href", "onload")]
    assert not re.search(r"url\(|@import|https?:", text)


def test_a_place_that_several_contracts_share_is_drawn_once() -> None:
    rows = (report().rows[0], report().rows[0]._replace(contract="causal-gradient"))
    text = CheckReport("Net", rows, CheckLengths(48, 64), 0).to_html()
    assert text.count("<svg") == 1
    assert "The same place as above" in text


def test_the_page_is_written_as_it_is_given(tmp_path: Path) -> None:
    report().write_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == report().to_html()
    with pytest.raises(UserError, match="cannot be written: No such file or directory"):
        report().write_html(tmp_path / "missing" / "report.html")


def test_the_picture_marks_exactly_the_cells_of_the_leak() -> None:
    root = ElementTree.fromstring(matrix_svg(MATRIX, standalone=True))
    cells = [(element.get("class"), element.get("x"), element.get("y")) for element in root.iter() if element.get("x")]
    leaks = [(x, y) for style, x, y in cells if style == "leak"]
    # the last is in the legend
    assert len(leaks) == 2
    assert leaks[0] == ("88.5", "60.5")
    marks = [element for element in root.iter() if element.get("class") == "mark"]
    assert len(marks) == 2
    assert sum(style == "actual" for style, _, _ in cells) == 9 + 1
    assert sum(style == "allowed" for style, _, _ in cells) == 1 + 1


def test_positions_of_a_late_part_are_labeled_as_they_are() -> None:
    svg = matrix_svg(DependenceMatrix(MATRIX.rows, start=40, bin_size=3))
    assert re.findall(r'text-anchor="middle">(\d+)<', svg) == ["40", "43", "46", "49"]
    assert DependenceMatrix(MATRIX.rows, start=40, bin_size=3).leaks == ((43, 49),)


@pytest.mark.parametrize(("checked", "message", "color"), [(KEPT, "kept", "blue"), (report(), "2 broken", "orange")])
def test_the_badge_says_how_many_contracts_are_broken(checked: CheckReport, message: str, color: str) -> None:
    badge = {"schemaVersion": 1, "label": "contracts", "message": message, "color": color}
    assert json.loads(checked.badge_json()) == badge
    picture = ElementTree.fromstring(checked.badge_svg())
    assert picture.get("aria-label") == f"contracts: {message}"
    assert [element.text for element in picture.iter() if element.tag.endswith("}text")] == ["contracts", message]


def test_nothing_tried_is_not_called_kept() -> None:
    nothing = CheckReport("Net", report().rows[3:], CheckLengths(48, 64), 0)
    assert json.loads(nothing.badge_json())["message"] == "none tried"


def test_json_follows_its_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    record = json.loads(report().to_json())
    assert list(validator.iter_errors(record)) == []
    assert record["rows"][0]["place"]["matrix"] == {"rows": ["1000", "1101", "0110", "1111"], "start": 0, "bin_size": 1}
    # no key that the schema does not name, so that a new one is documented
    place_schema = schema["$defs"]["place"]
    assert set(record["rows"][0]["place"]) == set(place_schema["properties"]) == set(place_schema["required"])
    assert set(record) == set(schema["properties"])
    assert set(record["rows"][0]) == set(schema["$defs"]["row"]["properties"])
    record["rows"][0]["place"]["kind"] = "something else"
    assert list(validator.iter_errors(record))


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, vocab_size=16, dim=8):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + x.mean(1, keepdim=True)
        return self.head(x)
"""


def test_the_command_names_the_statement_in_a_file_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL, encoding="utf-8")
    request = CheckRequest(only="causal", length=16, html="page.html")
    assert run_checks(["net.py:Net", "dim=4"], request, CommandFace()) == 1
    page = Page(Path("page.html").read_text(encoding="utf-8"))
    assert "in the forward of the model itself (Net), after embedding, before head" in page.text
    assert "net.py:13: x = x + x.mean(1, keepdim=True)" in page.text
    assert "  net.py:13: x = x + x.mean(1, keepdim=True)\n" in capsys.readouterr().out


def test_a_terminal_shows_the_place_below_its_contract() -> None:
    lines = wrapped_report(report(), 70).splitlines()
    row = next(index for index, line in enumerate(lines) if line.startswith("causal "))
    assert lines[row + 1 : row + 4] == [f"  {line}" for line in PLACE.lines(68)]


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


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_fits_a_telephone_and_its_colors_can_be_told_apart(browser: Any, tmp_path: Path, theme: str) -> None:
    from PIL import Image

    file = tmp_path / "page.html"
    report(sentence="a" * 200).write_html(file)
    page = browser.new_page(color_scheme=theme)
    page.goto(file.as_uri())
    for width in (400, 1200):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == width
    shades = []
    for style in ("actual", "allowed"):
        box = page.query_selector(f"rect.{style}").bounding_box()
        clip = {"x": box["x"] + box["width"] / 2, "y": box["y"] + 2, "width": 1, "height": 1}
        screen = Image.open(io.BytesIO(page.screenshot(clip=clip, full_page=True)))
        shades.append(screen.convert("L").tobytes()[0])
    # in shades of gray what depends and what only may are far apart; the leak has a cross as well
    assert abs(shades[0] - shades[1]) > 60, shades
    page.close()
