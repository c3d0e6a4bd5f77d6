"""Write the pages of the documentation that follow from the code: `python docs/make.py`, or `--check` to compare."""

import sys
from pathlib import Path

from manyformer.api import recipes
from manyformer.config import describe_settings
from manyformer.config.setting_names import SECTIONS, UNION_TAGS
from manyformer.recipes import RecipeCard
from manyformer.recipes.card_text import (
    COMMON_KEYWORDS,
    CONTRACT_MEANINGS,
    keyword_docs,
    promised_contracts,
    publication_year,
)

HERE = Path(__file__).parent
MARK = "<!-- made by docs/make.py from the code: change that, not this -->\n"


def recipes_page() -> str:
    """All recipes: a table, then each with what is new, its keywords and why it does not promise what it does not."""
    found = recipes()
    lines = [MARK, "# Recipes", "", "A promise is something that `manyformer check NAME` tests:", ""]
    lines += [f"- **{name}**: {meaning}" for name, meaning in CONTRACT_MEANINGS.items()]
    lines += ["", "| recipe | title | year | task | promises | cost |", "| --- | --- | --- | --- | --- | --- |"]
    for name, recipe in found.items():
        card = recipe.card
        cells = (f"[`{name}`](#{name})", card.title, publication_year(card) or "", card.task, ", ".join(promised_contracts(card)), card.cost)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for name, recipe in found.items():
        lines += ["", f"## {name}", "", *_about(recipe.card)]
        lines += ["", "| keyword | type | default |", "| --- | --- | --- |"]
        lines += [f"| `{k.name}` | {k.type} | {_shown(k.default)} |" for k in keyword_docs(recipe)]
    lines += ["", "## Keywords that recipes share", ""]
    lines += [f"- `{name}`: {meaning}" for name, meaning in COMMON_KEYWORDS.items()]
    return "\n".join(lines) + "\n"


def _about(card: RecipeCard) -> list[str]:
    lines = [
        f"**{card.title}.** {card.summary}",
        "",
        f"Paper: {card.paper}. Cost: {card.cost}. Runs on: {', '.join(card.backends)}.",
    ]
    lines += ["", *(f"- not {name}: {reason}" for name, reason in card.reasons.items())]
    return lines


def _shown(value: object) -> str:
    return "" if value is None else f"{value}"


def settings_page() -> str:
    """All settings of a run with their defaults."""
    lines = [MARK, "# Settings of a run", "", "Defaults where neither a run file nor the command line says otherwise."]
    rows = [row for row in describe_settings() if not row.key.startswith("model.")]
    lines += ["", "| setting | default | what it may be | meaning |", "| --- | --- | --- | --- |"]
    lines += [f"| `{r.key}` | {_cell(r.default)} | {_cell(r.type)} | {_cell(r.doc)} |" for r in rows]
    for section, (tag, usual) in UNION_TAGS.items():
        for member in SECTIONS[section]:
            name = str(member.model_fields[tag].default)
            if name != usual:
                lines += ["", f"## {section}.{tag}={name}", "", (member.__doc__ or "").strip(), ""]
                lines += ["| setting | default | meaning |", "| --- | --- | --- |"]
                for key, field in member.model_fields.items():
                    default = "required" if field.is_required() else field.default
                    meaning = " ".join(str(field.description or "").split())
                    lines.append(f"| `{section}.{key}` | {_cell(str(default))} | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES = {"recipes.md": recipes_page, "settings.md": settings_page}


def main() -> int:
    """Write the pages, or with --check say which ones are out of date."""
    stale = [name for name, page in PAGES.items() if not _same(HERE / name, page())]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"docs/{name} is out of date: run `python docs/make.py`", file=sys.stderr)
        return bool(stale)
    for name in stale:
        (HERE / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"wrote docs/{name}")
    return 0


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
