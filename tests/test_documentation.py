"""The documentation names all commands and public names and nothing that does not exist; made pages are current."""

import ast
import importlib
import importlib.util
import inspect
import itertools
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml

import manyformer as mf
from manyformer.analysis.contracts import CONTRACTS
from manyformer.base.files.json_records import DamagedFile
from manyformer.cli import import_commands
from manyformer.cli.app import app
from manyformer.config import shipped_runs
from manyformer.config.comparison import ComparisonFile
from manyformer.config.published_sizes import PUBLISHED_SIZES
from manyformer.config.setting_names import RUN_SETTINGS, SECTIONS, section_members
from manyformer.training.run_folder import as_training_run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BUILT = {
    DOCS / "generated" / name for name in ("commands.md", "shipped.md", "api/index.md", "gallery.md", "pictures.md")
}
"""The pages that docs/conf.py writes before it builds the site."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(page for page in DOCS.rglob("*.md") if not page.is_relative_to(DOCS / "generated")),
]
GENERATED = ("recipes.md", "settings.md", "ledger.md", "gpu-results.md")
WRITTEN = [page for page in PAGES if page.name not in GENERATED and page.parent != DOCS / "recipes"]
"""The pages that are not generated."""


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


EARLIER_NAMES = {"floors"}
"""Commands under names of earlier versions, which pages of that time have."""


def command_tree(group: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it; groups and earlier names are left out."""
    if not isinstance(group, typer.core.TyperGroup):
        yield prefix, group
        return
    for name, command in group.commands.items():
        if not command.hidden or name in EARLIER_NAMES:
            yield from command_tree(command, (*prefix, name))


_spec = importlib.util.spec_from_file_location("docs_make", ROOT / "docs" / "make.py")
assert _spec is not None
make = importlib.util.module_from_spec(_spec)
assert _spec.loader is not None
_spec.loader.exec_module(make)

sys.path.insert(0, str(ROOT / "docs"))
import api_pages  # noqa: E402 - modules of docs/
import site_pages  # noqa: E402

import_commands()
COMMANDS = dict(command_tree(typer.main.get_command(app)))


FENCED = re.compile(r"^ *```([^\n`]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
"""Blocks of code, in their order, so that the end of one is not taken for the beginning of the next."""


def code_blocks(page: Path, language: str) -> Iterator[str]:
    """The code in a language, also in lists; "" is for blocks without a language, such as commands."""
    return (textwrap.dedent(code) for name, code in FENCED.findall(page.read_text()) if name == language)


def added_modules(page: Path) -> set[str]:
    """The modules that a page shows how to add to the package, by the paths of their files."""
    return {name.replace("/", ".") for name in re.findall(r"src/(manyformer/[\w/]+)\.py", page.read_text())}


def command_lines(page: Path) -> Iterator[str]:
    """The commands of code blocks, also behind a prompt, and of inline code."""
    texts = itertools.chain(code_blocks(page, ""), code_blocks(page, "text"))
    blocks = [line.removeprefix("$ ").removeprefix(".venv/bin/") for block in texts for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", FENCED.sub("", page.read_text()))
    return (line for line in (*blocks, *inline) if line.startswith("manyformer "))


def test_the_ledger_names_every_recipe_in_one_whole_record(tmp_path: Path) -> None:
    from ledger_page import LEDGER, read_ledger

    ledger = json.loads(LEDGER.read_text())
    records = ledger["records"]
    assert [record.recipe for record in read_ledger().records] == [record["recipe"] for record in records]
    for changes, message in (
        ({"recipe": "gatt"}, "there is no recipe 'gatt'"),
        ({"ours": None}, "either all of ours"),
        ({"seeds": 0}, "seeds"),
        ({"page": "../secret.md"}, "page"),
        ({"measure": "two\nlines"}, "measure"),
        ({"note": "more"}, "note"),
    ):
        path = tmp_path / "ledger.json"
        path.write_text(json.dumps(ledger | {"records": [records[0] | changes, *records[1:]]}))
        with pytest.raises(DamagedFile, match=message):
            read_ledger(path)
    for reasons, message in (
        ({}, "'audio-transformer-classifier' needs a record, or a reason"),
        (ledger["without_figure"] | {"gat": "a reason"}, "'gat' has a record, and a reason"),
        (ledger["without_figure"] | {"gatt": "a reason"}, "there is no recipe 'gatt'"),
        (ledger["without_figure"] | {"compose position=fir": "a reason"}, "no recipe 'compose position=fir'"),
    ):
        path.write_text(json.dumps(ledger | {"without_figure": reasons}))
        with pytest.raises(DamagedFile, match=message):
            read_ledger(path)


@pytest.mark.parametrize("name", make.PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == make.PAGES[name](), "run `python docs/make.py`"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_runs_and_links_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"(?m)(?:^|`|/bin/)manyformer ([a-z]+)\b", text):
        is_added = f"manyformer.cli.{name}" in added_modules(page)
        assert is_added or name in {words[0] for words in COMMANDS}, f"`manyformer {name}`"
    for name in re.findall(r"manyformer (?:train|runs copy|runs show) ([a-z]+/[a-z0-9-]+)", text):
        assert name in shipped_runs(), name
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        target = (page.parent / link).resolve()
        assert target.exists() or target in BUILT, link


def section_classes(section: str) -> Iterator[Any]:
    """All classes of a section of settings, those of the rules of synthetic data among them."""
    for member in section_members(section):
        yield from (member, *getattr(member, "variants", {}).values())


def test_formulas_can_be_drawn() -> None:
    """Those in dollars, as docs/conf.py turns them into MathML."""
    mathml = pytest.importorskip("docutils.utils.math.latex2mathml", reason="pip install 'manyformer[docs]'")
    for page in (DOCS / "mechanisms").glob("*.md"):
        text = re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for block, inline in re.findall(r"\$\$(.+?)\$\$|\$(.+?)\$", text, re.DOTALL):
            assert mathml.tex2mathml(block or inline, as_block=bool(block)), page


@pytest.mark.parametrize("page", WRITTEN, ids=page_id)
def test_documented_settings_exist(page: Path) -> None:
    """`section.key=value` anywhere, `section.key` alone in inline code, and the keys of files."""
    keys = {f"{name}.{key}" for name in SECTIONS for member in section_classes(name) for key in member.model_fields}
    dotted = rf"(?:{'|'.join(sorted(SECTIONS))})\.\w+"
    documented = re.findall(rf"(?<![\w./-])({dotted})=", page.read_text()) + re.findall(
        rf"`({dotted})`", page.read_text()
    )
    # a file of that name stands in a run's folder
    assert [key for key in documented if key not in keys and key != "log.txt"] == []
    for block in code_blocks(page, "yaml"):
        for key, value in yaml.safe_load(block).items():
            assert key in {"extends", "run", "cases", *RUN_SETTINGS, *ComparisonFile.model_fields}, key
            if key in SECTIONS and isinstance(value, dict):
                assert {f"{key}.{name}" for name in value} <= keys, key


def test_every_command_and_public_name_is_documented() -> None:
    text = "\n".join(page.read_text() for page in WRITTEN)
    assert [
        " ".join(words)
        for words in COMMANDS
        if words[0] not in EARLIER_NAMES and f"manyformer {' '.join(words)}" not in text
    ] == []
    assert [name for name in mf.__all__ if not name.startswith("_") and f"mf.{name}" not in text] == []


@pytest.mark.parametrize("page", WRITTEN, ids=page_id)
def test_documented_commands_have_these_options(page: Path) -> None:
    for line in command_lines(page):
        # two spaces begin an explanation
        words = shlex.split(re.split(r"\s{2,}|\s[|>]\s", line)[0])[1:]
        if not words or words[0].startswith("-") or words[0].isupper():
            continue
        names = next((name for name in COMMANDS if tuple(words[: len(name)]) == name), None)
        is_group = any(name[0] == words[0] and len(name) > 1 for name in COMMANDS)
        assert names or (is_group and len(words) == 1), line
        if names is None:
            continue
        known = {option for parameter in COMMANDS[names].params for option in parameter.opts} | {"--import", "--help"}
        has_settings = COMMANDS[names].context_settings.get("ignore_unknown_options", False)
        options = [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]
        assert has_settings or set(options) <= known, f"{line}: {set(options) - known}"


PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z]{2,}\b|init_from=|start=|--import|teacher=")
"""In commands that cannot be resolved as they stand: names to fill in, and files that have to exist."""


@pytest.mark.parametrize("page", WRITTEN, ids=page_id)
def test_documented_runs_and_recipes_resolve(page: Path) -> None:
    """The first word after a command is a recipe, a shipped run or a path, and settings of `train` are valid."""
    for line in command_lines(page):
        words = shlex.split(re.split(r"\s{2,}|\s[|>]\s", line)[0])[1:]
        if len(words) < 2 or words[0] not in ("train", "show", "check", "bench") or PLACEHOLDER.search(line):
            continue
        names = [word.partition(":")[0] for word in words[1 : 2 if words[0] == "train" else None]]
        names = list(itertools.takewhile(lambda word: not re.search(r"^-|=|^$", word), names))
        for name in names:
            is_path = name.endswith((".yaml", "/", ".py")) or name.startswith(("runs/", "models/", "downloads/"))
            is_module = name.isidentifier() and importlib.util.find_spec(name) is not None
            is_recipe = name in {*mf.recipes(), *PUBLISHED_SIZES}
            assert is_path or is_module or is_recipe or name in shipped_runs(), line
        if words[0] == "train" and names and names[0] in (*{*mf.recipes(), *PUBLISHED_SIZES}, *shipped_runs()):
            as_training_run(names[0], [word for word in words[2:] if re.match(r"[\w.]+=", word)])


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] not in EARLIER_NAMES], ids=" ".join)
def test_every_option_says_what_it_means(words: tuple[str, ...]) -> None:
    """The page of commands, which is built from them, so describes each."""
    section = site_pages.commands_page().split(f"\n## {' '.join(words)}\n")[1].split("\n## ")[0]
    for parameter in COMMANDS[words].params:
        if parameter.param_type_name == "option":
            assert re.search(rf"`{parameter.opts[0]}`.* \| \S", section), parameter.name


def test_every_public_name_has_a_page_with_its_description() -> None:
    pages = api_pages.api_pages(DOCS)
    for module in api_pages.public_modules():
        assert f".. automodule:: {module}\n" in pages[f"api/{module}.rst"]
        for name, value in api_pages.exported_names(module).items():
            assert not (inspect.isclass(value) or inspect.isroutine(value)) or inspect.getdoc(value), name
            # under the first module that exports it
            (place,) = re.findall(rf":doc:`{name} <(names/[^>]+)>`", pages[f"api/{module}.rst"])
            assert re.search(r"^\.\. (auto\w+|py:data):: \S+\b" + name + "$", pages[f"api/{place}.rst"], re.M), place
            assert f"<../{module}>" in pages[f"api/{place}.rst"], place
    # file systems without upper case would have one file for two
    assert len({page.lower() for page in pages}) == len(pages)
    assert ":doc:`Generation and translation </generation>`" in pages["api/names/manyformer.generate.rst"]
    assert "* - ``greedy``" in pages["api/names/manyformer.generate.rst"]


def test_every_recipe_stands_on_a_page_of_its_mechanism() -> None:
    pages = [page.read_text() for page in (DOCS / "mechanisms").glob("*.md")]
    blocks = [block for text in pages for block in re.findall(r"^```{recipe-cards}\n(.*?)^```", text, re.M | re.S)]
    patterns = [pattern for block in blocks for pattern in block.split()]
    assert [name for name in mf.recipes() if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in mf.recipes())] == []


def test_every_recipe_stands_in_the_indexes_by_task_and_family() -> None:
    pages = site_pages.recipe_cards.gallery_pages()
    for page, index in ((DOCS / "recipes.md", (DOCS / "recipes.md").read_text()), (None, pages["gallery.md"])):
        tasks, families = (
            re.search(rf"^## {title}\n(.*?)(?=^## |^```)", index, re.M | re.S)[1] for title in ("By task", "By family")
        )
        for name, recipe in mf.recipes().items():
            target = f"{recipe.card.family}.md#{name})"
            assert target in tasks, name
            assert target in families, name
            folder = "gallery" if page is None else "recipes"
            text = pages[f"gallery/{recipe.card.family}.md"] if page is None else None
            text = text or (DOCS / folder / f"{recipe.card.family}.md").read_text()
            assert f"\n## {name}\n" in text


def test_a_mask_is_drawn_cell_by_cell() -> None:
    drawing = site_pages.recipe_cards.mask_drawing("heads 0\n██\n·░\n\nheads 1\n··\n·█", "a<b")
    assert drawing.count("<svg") == 2
    assert 'aria-label="Mask of a&lt;b heads 0"' in drawing
    cell, top = site_pages.recipe_cards.CELL, site_pages.recipe_cards.CAPTION
    # two cells beside each other are one rectangle; a cell that is visible to a share is lighter
    assert f'<path fill-opacity="1" d="M0 {top}h{2 * cell}v{cell}h-{2 * cell}z"/>' in drawing
    assert f'<path fill-opacity="0.25" d="M{cell} {top + cell}h{cell}v{cell}h-{cell}z"/>' in drawing


def test_the_table_of_contracts_has_their_names() -> None:
    (table,) = re.findall(r"^\| contract \|.*\n\|.*\n((?:\|.*\n)+)", (ROOT / "docs/check.md").read_text(), re.MULTILINE)
    names = re.findall(r"`([^`]+)`", "\n".join(line.split("|")[1] for line in table.splitlines()))
    assert sorted(names) == sorted(CONTRACTS)


@pytest.mark.parametrize("page", WRITTEN, ids=page_id)
def test_documented_choices_of_contracts_exist(page: Path) -> None:
    options = re.findall(r"manyformer check .*?--(?:only|skip)[ =](\S+)", page.read_text())
    lists = re.findall(r"mf\.check\(.*?(?:only|skip)=\[(.*?)\]", page.read_text())
    names = [name.strip(' "`') for text in (*options, *lists) for name in text.split(",")]
    assert [name for name in names if name not in CONTRACTS] == []


@pytest.mark.parametrize("page", WRITTEN, ids=page_id)
def test_documented_code_names_what_exists(page: Path) -> None:
    """Modules, what is imported of them, and the keywords of what is called."""
    imported: dict[str, Any] = {}
    for block in itertools.chain(code_blocks(page, "python"), code_blocks(page, "{code-cell} python")):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("manyformer"):
                if node.module in added_modules(page):
                    continue
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], node.module
                imported |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mf":
                assert hasattr(mf, node.attr), f"mf.{node.attr}"
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            function = getattr(mf, name.removeprefix("mf."), None) if name.startswith("mf.") else imported.get(name)
            if function is None or name in defined or not takes_named_keywords(function):
                continue
            keywords = {keyword.arg for keyword in call.keywords} - {None}
            assert keywords <= set(inspect.signature(function).parameters), ast.unparse(call)


def takes_named_keywords(function: Any) -> bool:
    """Whether the signature says which keywords there are."""
    if not (inspect.isfunction(function) or inspect.isclass(function)):
        return False
    parameters = inspect.signature(function).parameters.values()
    return all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters)


COMPARED = {
    "title": "Positions",
    "run": {
        "recipe": "compose",
        "model": {"dim": 8, "depth": 1, "heads": 1},
        "data": {"kind": "synthetic", "rule": "markov", "length": 16},
        "limits": {"steps": 2},
        "batch": {"tokens": 64},
        "evaluate": {"every": None, "batches": 1},
    },
    "cases": {"rope": {"model": {"position": "rope"}}, "alibi": {"model": {"position": "alibi"}}},
}


def test_the_code_of_the_page_on_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("Once there was a text that a model learned. " * 400)
    Path("positions.yaml").write_text(yaml.safe_dump(COMPARED))
    # the page checks at the usual lengths, where exchanges of all tokens take ten seconds
    lengths = importlib.import_module("manyformer.analysis.contracts.check")
    monkeypatch.setattr(lengths, "LONG_LENGTH", 64)
    monkeypatch.setattr(lengths, "PROBE_LENGTH", 64)
    names: dict[str, Any] = {}
    exec("\n".join(code_blocks(ROOT / "docs/python.md", "python")), names)
    for file in ("saved/model.safetensors", "models/window/model.safetensors", "exported/config.json", "page.html"):
        assert (tmp_path / file).is_file(), file
    assert torch.equal(names["imported"].state_dict()["head.weight"], names["model"].state_dict()["head.weight"])
    assert "rope" in names["comparison"].to_markdown()


EXECUTED = ("adapters", "compile-and-export", "interpretability", "own-loop", "own-models")
"""The pages of `how-to` whose code runs as it stands, in one go."""


@pytest.mark.parametrize("name", EXECUTED)
def test_the_code_of_a_how_to_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = list(code_blocks(DOCS / "how-to" / f"{name}.md", "python"))
    assert code
    exec("\n".join(code), {"__name__": "__main__"})


def test_the_recipe_of_the_readme_is_what_it_says(tmp_path: Path) -> None:
    """In a process of its own: what a page registers must not be seen by tests of all recipes."""
    (block,) = code_blocks(ROOT / "README.md", "python")
    assert len([line for line in block.splitlines() if line.strip()]) <= 18
    (tmp_path / "hybrid.py").write_text(block)
    words = ["check", "hybrid", "--import", "hybrid", "--only", "causal,cached,decode,packing", "--length", "24"]
    command = [sys.executable, "-m", "manyformer", *words]
    ended = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert "hybrid: 4 passed" in ended.stdout, ended.stdout + ended.stderr
