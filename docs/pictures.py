"""The pictures of the site: a small run, its page and a comparison, made by the commands that stand beside them."""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import build_cache

CHROMIUM = Path("/usr/bin/chromium")
RUN = "train lm/stdlib model.dim=64 model.depth=2 model.heads=4 limits.steps=200 evaluate.every=50"
VIEW = 'view runs/lm-stdlib "def add(a, b):" --out page.html'
COMPARISON = "compare positions.yaml --out comparison"
COMPARISON_FILE = """\
title: Loss beyond the training length of 32
run:
  recipe: compose
  model: {dim: 32, depth: 1, heads: 2, feedforward: gelu}
  data: {kind: synthetic, rule: markov, length: 32, context: 0.5}
  optim: {name: adamw, lr: 0.005}
  batch: {tokens: 1024}
  limits: {steps: 150}
  evaluate: {every: null}
cases:
  sinusoid: {model: {position: sinusoid}}
  rope: {model: {position: rope}}
  alibi: {model: {position: alibi}}
sweep:
  data.length: [32, 64, 128]
"""
HEADS = 'attention runs/lm-stdlib "def add(a, b):" --layer 1 --heads --out heads.png'
MIXING = "show reformer --mixing --out mixing.png"
PATTERN = "show longformer --pattern --length 1024 --out pattern.png"


class Picture(NamedTuple):
    """A picture: its name, what it shows, and the commands that make it."""

    name: str
    caption: str
    commands: tuple[str, ...]


class Screen(NamedTuple):
    """A screenshot of the page: its file, the width of the window in pixels, and the theme."""

    file: str
    width: int
    theme: str


PICTURES = (
    Picture("curves.png", "The curves of a training, which each run draws by itself", (RUN,)),
    Picture("page.png", "The page of a run in a browser: heads at a glance, and one large", (RUN, VIEW)),
    Picture("page-dark.png", "The same on a dark screen", (RUN, VIEW)),
    Picture("page-phone.png", "The same on a phone, 360 pixels wide", (RUN, VIEW)),
    Picture("heads.png", "The weights of each head of a layer", (RUN, HEADS)),
    Picture("comparison.png", "A comparison: its scores over the length of the rows", (COMPARISON,)),
    Picture("pattern-1.png", "Who may attend to whom in Longformer: the first of its masks", (PATTERN,)),
    Picture("mixing.png", "Which tokens change which outputs of Reformer, as measured", (MIXING,)),
)
SCREENS = (
    Screen("page.png", 1200, "light"),
    Screen("page-dark.png", 1200, "dark"),
    Screen("page-phone.png", 360, "light"),
)
LINE_DRAWINGS = ("curves.png", "comparison.png")
WITHOUT_BROWSER = f"Not drawn: this site was built without Chromium ({CHROMIUM}) or without playwright."


def make_pictures(folder: Path) -> None:
    """Make the pictures, without Chromium those of a page left out, unless `folder` has them from the same package and
    commands. Raises RuntimeError for a command that fails."""
    key = folder / "key.txt"
    if not key.is_file() or key.read_text(encoding="utf-8") != _key():
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    screens = [screen for screen in SCREENS if not (folder / screen.file).is_file()]
    drawn = {picture.name for picture in PICTURES} - {screen.file for screen in SCREENS}
    if all((folder / name).is_file() for name in drawn) and not (screens and _has_browser()):
        return
    (folder / "positions.yaml").write_text(COMPARISON_FILE, encoding="utf-8")
    for command in dict.fromkeys(command for picture in PICTURES for command in picture.commands):
        run(command, folder)
    (folder / "runs/lm-stdlib/curves.png").replace(folder / "curves.png")
    (folder / "comparison/picture.png").replace(folder / "comparison.png")
    if _has_browser():
        photograph(folder / "page.html", screens)
    key.write_text(_key(), encoding="utf-8")


def _key() -> str:
    """What the pictures follow from: this file, and the package."""
    return f"{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]} {build_cache.package_digest()}"


def run(command: str, folder: Path) -> None:
    """Run a command of manyformer in a folder. Raises RuntimeError with what it says if it fails."""
    environment = os.environ | {"COLUMNS": "100"}
    words = [sys.executable, "-m", "manyformer", *shlex.split(command)]
    ended = subprocess.run(words, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"manyformer {command}: {ended.stderr}")


def _has_browser() -> bool:
    if not CHROMIUM.is_file():
        return False
    try:
        import playwright.sync_api  # noqa: F401 - only whether it is there
    except ImportError:
        return False
    return True


def photograph(page: Path, screens: list[Screen]) -> None:
    """Screenshots of a page from disk."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        options = ["--no-sandbox", "--disable-background-networking"]
        browser: Any = driver.chromium.launch(executable_path=str(CHROMIUM), args=options)
        for file, width, theme in screens:
            tab = browser.new_page(viewport={"width": width, "height": 760}, color_scheme=theme)
            tab.goto(page.resolve().as_uri())
            tab.wait_for_selector(".run")
            tab.screenshot(path=page.parent / file)
        browser.close()


def pictures_page(folder: Path) -> str:
    """The page of pictures with their commands; `folder` is beside it."""
    return "\n".join(["# Pictures", "", "Made with this site, by the commands beside them.", *_sections(folder)])


def _sections(folder: Path) -> Iterator[str]:
    for name, caption, commands in PICTURES:
        yield from ("", f"## {caption}", "", "```", *(f"manyformer {command}" for command in commands), "```", "")
        if COMPARISON in commands:
            yield from ("with this `positions.yaml`:", "", "```yaml", COMPARISON_FILE.rstrip(), "```", "")
        picture = folder / name
        yield from _image(f"{folder.name}/{name}", caption) if picture.is_file() else (WITHOUT_BROWSER,)
    yield ""


def _image(path: str, caption: str) -> Iterator[str]:
    """A picture; lines on white are inverted on a dark screen."""
    inverted = [":class: drawn"] if path.endswith(LINE_DRAWINGS) else []
    yield from (f"```{{image}} {path}", f":alt: {caption}", *inverted, "```")
