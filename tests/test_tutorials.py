"""The code of the tutorials runs; the site, which runs it as well, builds without a warning and needs no network."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
TUTORIALS = [page for page in sorted((DOCS / "tutorials").glob("*.md")) if "code-cell" in page.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    cells = re.findall(r"^```{code-cell} python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert cells
    # in a process of its own: tutorials import modules that they write
    command = [sys.executable, "-c", "\n".join(cells)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the site needs pip install 'manyformer[docs]'")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", DOCS, tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    texts = {page: page.read_text() for page in tmp_path.rglob("*.html") if "_static" not in page.parts}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    assert len(texts) > 700
    for page, text in texts.items():
        assert 'name="viewport"' in text
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(https?:[^"]+)"', text)
        assert loaded == [], page
        for href in re.findall(r'href="([^"]*)"', text):
            if re.match(r"\w+:", href):
                assert re.fullmatch(r"https?://[\w.-]+(/\S*)?|mailto:\S+", href), f"{page}: {href}"
                continue
            link, _, anchor = href.partition("#")
            target = (page.parent / link.partition("?")[0]).resolve() if link else page
            assert target.exists(), f"{page}: {href}"
            # pages of source have one name for a module whose names two packages export: of these the page is right
            if target.suffix == ".html" and anchor and "_modules" not in page.parts:
                assert anchor in anchors[target], f"{page}: {href}"
    found = search(tmp_path, "flash", "attent")
    assert {"kernels", "decoding", "concepts", "mechanisms/attention"} <= found


def search(site: Path, *stems: str) -> set[str]:
    """The pages whose texts have all these words, by the index that the site searches."""
    index = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    found = []
    for stem in stems:
        # those of titles stand apart, and a single page without a list
        places = (index[kind].get(stem, []) for kind in ("terms", "titleterms"))
        numbers = [number for entry in places for number in ([entry] if isinstance(entry, int) else entry)]
        found.append({index["docnames"][number] for number in numbers})
    return set.intersection(*found)
