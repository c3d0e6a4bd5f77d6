"""The documentation follows from the code, and its examples exist."""

import importlib.util
import re
from pathlib import Path

import pytest

from manyformer.cli.app import app
from manyformer.config import shipped_runs

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {info.name or info.callback.__name__ for info in app.registered_commands if info.callback} | {
    group.name for group in app.registered_groups
}
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_spec = importlib.util.spec_from_file_location("docs_make", ROOT / "docs" / "make.py")
assert _spec is not None
make = importlib.util.module_from_spec(_spec)
assert _spec.loader is not None
_spec.loader.exec_module(make)


@pytest.mark.parametrize("name", make.PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == make.PAGES[name](), "run `python docs/make.py`"


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: file.name)
def test_commands_and_links_in_texts_exist(file: Path) -> None:
    text = file.read_text()
    for name in re.findall(r"(?m)(?:^|`|/bin/)manyformer ([a-z]+)\b", text):
        assert name in COMMANDS, f"{file.name} speaks of `manyformer {name}`"
    for name in re.findall(r"manyformer (?:train|runs copy|runs show) ([a-z]+/[a-z0-9]+)", text):
        assert name in shipped_runs(), f"{file.name} speaks of the run {name}"
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (file.parent / link).exists(), f"{file.name} links to {link}"
