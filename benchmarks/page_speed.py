"""The size and the speed of the page of `manyformer view` in a real browser.

    python benchmarks/page_speed.py                 # 48 heads of 512 tokens, and the size of 16 heads of 48 tokens

Needs playwright and Debian's Chromium (`apt-get install --no-install-recommends chromium`).
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import Page, sync_playwright

from manyformer.analysis.figures.attention_maps import AttentionMap
from manyformer.analysis.viewer.model_view import ModelView
from manyformer.analysis.viewer.page import AttentionPage, render_page

CHROMIUM = "/usr/bin/chromium"
HEADS_PER_LAYER = 16
TIMED_SELECTION = """(argument) => {
  const start = performance.now();
  select(argument, true);
  document.body.offsetHeight;
  return performance.now() - start;
}"""


def page_of(heads: int, tokens: int, *, scale: float) -> AttentionPage:
    """A page with the softmax of normally distributed scores, whose deviation is `scale`."""
    labels = tuple(f"token{number}" for number in range(tokens))
    maps = [
        AttentionMap(
            f"body.{first // HEADS_PER_LAYER}.attention",
            labels,
            labels,
            (torch.randn(min(HEADS_PER_LAYER, heads - first), tokens, tokens) * scale).softmax(-1),
        )
        for first in range(0, heads, HEADS_PER_LAYER)
    ]
    return AttentionPage(render_page([ModelView("run", "Model", maps, {})]))


def first_paint(page: Page) -> float:
    """The time from navigation to the first paint, in ms."""
    paints = page.evaluate("performance.getEntriesByType('paint').map((entry) => entry.startTime)")
    return float(min(paints))


def hover_times(page: Page, tokens: int) -> list[float]:
    """The times to show another pair of tokens, in ms, layout included."""
    pairs = [{"query": number * 7 % tokens, "key": number * 13 % tokens} for number in range(100)]
    return [page.evaluate(TIMED_SELECTION, pair) for pair in pairs]


def measure(heads: int, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path = Path(folder) / "page.html"
        page_of(heads, tokens, scale=2.0).save(path)
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for number in range(3):
            page = browser.new_page(viewport={"width": 1280, "height": 860})
            page.goto(path.as_uri())
            page.wait_for_selector(".view canvas")
            ready, hover = page.evaluate("performance.now()"), hover_times(page, tokens)
            print(
                f"{heads} heads of {tokens} tokens, {path.stat().st_size / 1e6:.1f} MB, run {number}: first paint "
                f"{first_paint(page):.0f} ms, large map {ready:.0f} ms, hover {statistics.median(hover):.1f} ms, "
                f"at most {max(hover):.1f} ms"
            )
            page.close()
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    torch.manual_seed(0)
    for scale in (1.0, 2.0):
        size = len(page_of(16, 48, scale=scale).html.encode())
        print(f"16 heads of 48 tokens, softmax of normal scores times {scale:g}: {size / 1000:.1f} kB")
    measure(options.heads, options.tokens)
