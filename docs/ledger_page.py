"""The page of published figures and ours, from the records in ledger.json; every record is checked when it is read."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from manyformer.files.json_records import DamagedFile, read_json, validate_json
from manyformer.recipes import RECIPES

LEDGER = Path(__file__).parent / "ledger.json"

Text = Annotated[str, StringConstraints(min_length=1, max_length=300, pattern=r"^[^\n\r]*$")]


class LedgerRecord(BaseModel):
    """A published figure of a recipe, with ours and how it was measured, or the reason why it was not."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    recipe: Text
    measure: Text
    published: Text
    source: Text
    ours: Text | None = None
    command: Text | None = None
    seeds: Annotated[int, Field(gt=0)] | None = None
    cost: Text | None = None
    date: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\d$")] | None = None
    commit: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{7,40}$")] | None = None
    page: Annotated[str, StringConstraints(pattern=r"^[a-z-]+\.md$")] | None = None
    not_afforded: Text | None = None

    @model_validator(mode="after")
    def _is_measured_or_not(self) -> Self:
        measured = (self.ours, self.command, self.seeds, self.cost, self.date, self.commit, self.page)
        if (None in measured) != (self.not_afforded is not None) or (self.not_afforded and any(measured)):
            raise ValueError("either all of ours, command, seeds, cost, date, commit and page, or not_afforded")
        return self


class Ledger(BaseModel):
    """All records, in the order of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1]
    records: tuple[LedgerRecord, ...]


def read_ledger(path: Path = LEDGER) -> Ledger:
    """The records. Raises DamagedFile for a record that is not complete or of no recipe."""
    ledger: Ledger = validate_json(read_json(path, "the ledger"), Ledger, path)
    for record in ledger.records:
        if record.recipe not in RECIPES:
            raise DamagedFile(f"{path}: there is no recipe '{record.recipe}'")
    return ledger


def ledger_page(mark: str) -> str:
    """The page: a table of what was measured, one of what was not afforded, and the recipes without a record."""
    records = sorted(read_ledger().records, key=lambda record: record.recipe)
    lines = [
        mark,
        "# Ledger",
        "",
        "Published figures of recipes, and ours on the same data, from the records in `ledger.json`.",
    ]
    lines += ["", "| recipe | measure | published | ours | seeds | cost | date, commit | command |"]
    lines += ["| --- | --- | --- | --- | ---: | --- | --- | --- |"]
    for record in records:
        if record.ours is not None:
            published = f"{record.published} ({record.source})"
            cells = (record.ours, str(record.seeds), record.cost, f"{record.date}, {record.commit}")
            row = [
                f"[`{record.recipe}`]({record.page})",
                record.measure,
                published,
                *map(str, cells),
                f"`{record.command}`",
            ]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    lines += [
        "",
        "## Not afforded",
        "",
        "| recipe | measure | published | what it would take |",
        "| --- | --- | --- | --- |",
    ]
    for record in records:
        if record.not_afforded is not None:
            published = f"{record.published} ({record.source})"
            row = [f"`{record.recipe}`", record.measure, published, record.not_afforded]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    missing = sorted(RECIPES.keys() - {record.recipe for record in records})
    lines += [
        "",
        "## Without a record",
        "",
        "No published figure of these recipes is recorded; for most, the paper has none of this form:",
    ]
    return "\n".join([*lines, "", ", ".join(f"`{name}`" for name in missing), ""])
