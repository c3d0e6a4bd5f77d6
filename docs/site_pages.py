"""Write the pages of the site that follow from the code: commands, API, comparisons, the map of imports.

docs/conf.py calls `write` before each build; none of these pages is kept in git."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import import_map
import pictures
import recipe_cards
import typer
import yaml
from api_pages import api_pages

from manyformer.base.files.text_tables import markdown_table
from manyformer.cli import import_commands
from manyformer.cli.app import app
from manyformer.config import run_description, shipped_comparisons, shipped_runs


def write(folder: Path) -> None:
    """Write all pages into `folder`, and remove those of an earlier build."""
    docs = folder.parent
    pictures.make_pictures(folder / "pictures")
    pages = {
        "commands.md": commands_page(),
        "shipped.md": shipped_page(),
        "map.svg": import_map.draw(),
        **api_pages(docs),
    }
    pages |= {
        "more.md": further_pages(docs),
        **recipe_cards.gallery_pages(),
        "pictures.md": pictures.pictures_page(folder / "pictures"),
    }
    for stale in {path for path in folder.glob("**/*") if path.is_file()} - {folder / name for name in pages}:
        if not stale.is_relative_to(folder / "pictures"):
            stale.unlink()
    for name, text in pages.items():
        write_if_changed(folder / name, text)


def write_if_changed(path: Path, text: str) -> None:
    """Write a file unless it has that text already, so that only pages that changed are built again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def further_pages(docs: Path) -> str:
    """A page that leads to those of docs/ that no other page has in its table of contents."""
    listed = set[str]()
    for page in docs.glob("*.md"):
        for block in re.findall(r"^```{toctree}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            listed |= set(block.split())
    names = sorted({page.stem for page in docs.glob("*.md")} - listed - {"index"})
    contents = ["```{toctree}", *(f"../{name}" for name in names), "```"]
    return "\n".join(["# Further pages", "", *(contents if names else ["All pages stand in the navigation."]), ""])


def command_tree(group: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it; groups and earlier names are left out."""
    if not isinstance(group, typer.core.TyperGroup):
        yield prefix, group
        return
    for name, command in group.commands.items():
        if not command.hidden:
            yield from command_tree(command, (*prefix, name))


def all_commands() -> dict[tuple[str, ...], Any]:
    """Every command of the command line by the words that call it."""
    import_commands()
    return dict(command_tree(typer.main.get_command(app)))


def commands_page() -> str:
    """Every command with its arguments, options and examples."""
    lines = ["# Commands", "", "All commands with their options, as `manyformer COMMAND --help` shows them."]
    for words, command in all_commands().items():
        lines += ["", f"## {' '.join(words)}", "", *_help_text(command.help or command.short_help or "")]
        rows = [(_spelling(parameter), _meaning(parameter)) for parameter in command.params]
        lines += ["", *markdown_table(("argument or option", "meaning"), [row for row in rows if row[1]])]
        if examples := _plain(command.epilog or "").removeprefix("Examples").strip():
            lines += ["", "```", examples, "```"]
    return "\n".join(lines) + "\n"


def _help_text(text: str) -> Iterator[str]:
    for paragraph in inspect.cleandoc(_plain(text)).split("\n\n"):
        yield from (" ".join(paragraph.split()), "")


def _plain(text: str) -> str:
    """Text without the marks of rich."""
    return re.sub(r"(?<!\\)\[/?bold\]", "", text).replace("\\[", "[")


def _spelling(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name}`"
    return ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))


def _meaning(parameter: Any) -> str:
    return _plain(" ".join((getattr(parameter, "help", None) or "").split()))


def shipped_page() -> str:
    """The runs and comparisons of the package, each with its purpose and the command that starts it."""
    lines = ["# Shipped runs and comparisons", "", "## Runs", ""]
    lines += ["`manyformer train NAME` starts one, `manyformer runs show NAME` prints its file.", ""]
    rows = [(f"`{name}`", run_description(path)) for name, path in shipped_runs().items()]
    lines += [*markdown_table(("run", "purpose"), rows), "", "## Comparisons", ""]
    lines += ["Each says which results are expected; its report says which of them hold."]
    for name, path in shipped_comparisons().items():
        lines += ["", f"### {name}", "", *_comparison(name, path)]
    return "\n".join(lines) + "\n"


def _comparison(name: str, path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    settings = yaml.safe_load(text)
    comment = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    yield from (f"**{settings['title']}.** {comment}", "")
    yield from ("```", f"manyformer compare {name}", "```", "")
    yield f"Cases: {', '.join(f'`{case}`' for case in settings['cases'])}."
    if claims := settings.get("claims"):
        claims = [claims] if isinstance(claims, str) else claims
        yield from ("", "Expected:", "", *(f"- `{claim}`" for claim in claims))
