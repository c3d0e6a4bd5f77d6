"""The page of published figures and ours, from the records in the package; every record is checked when it is read."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from manyformer.base.files.json_records import DamagedFile, read_json, validate_json
from manyformer.base.files.text_tables import markdown_table
from manyformer.config.shipped import LEDGER
from manyformer.recipes import RECIPES
from manyformer.recipes.compose import POSITIONS

PARTS = frozenset(f"compose position={position}" for position in POSITIONS)
"""Papers whose mechanism is a position of `compose`, without a recipe of its own."""

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
    """All records, in the order of the file, and why there is no published figure of the other recipes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1]
    records: tuple[LedgerRecord, ...]
    without_figure: dict[Text, Text]


def read_ledger(path: Path = LEDGER) -> Ledger:
    """The records. Raises DamagedFile unless each is complete, and each recipe has a record or a reason for none.

    Those of other papers name a position of `compose`."""
    ledger: Ledger = validate_json(read_json(path, "the ledger"), Ledger, path)
    recorded = {record.recipe for record in ledger.records}
    for name in sorted((recorded | ledger.without_figure.keys()) - RECIPES.keys() - PARTS):
        raise DamagedFile(f"{path}: there is no recipe '{name}'")
    for name in sorted(recorded & ledger.without_figure.keys()):
        raise DamagedFile(f"{path}: '{name}' has a record, and a reason in without_figure why it has none")
    for name in sorted(RECIPES.keys() - recorded - ledger.without_figure.keys()):
        raise DamagedFile(f"{path}: '{name}' needs a record, or a reason in without_figure why it has none")
    return ledger


def ledger_page(mark: str) -> str:
    """The page: what was measured, what was too costly to repeat, and the recipes without a published figure."""
    ledger = read_ledger()
    records = sorted(ledger.records, key=lambda record: record.recipe)
    measured, not_afforded = [], []
    for record in records:
        published = f"{record.published} ({record.source})"
        if record.ours is not None:
            costs = (record.ours, record.seeds, record.cost, f"{record.date}, {record.commit}")
            name = f"[`{record.recipe}`]({record.page})"
            measured.append((name, record.measure, published, *costs, f"`{record.command}`"))
        else:
            not_afforded.append((f"`{record.recipe}`", record.measure, published, record.not_afforded))
    reasons = [(f"`{name}`", reason) for name, reason in sorted(ledger.without_figure.items())]
    heads = "recipe", "measure", "published"
    lines = [
        mark,
        "# Published results",
        "",
        "Published figures of recipes, and ours on the same data, from the records in `ledger.json` of the package.",
        "",
        *markdown_table((*heads, "ours", "seeds", "cost", "date, commit", "command"), measured, right=["seeds"]),
        *("", "## Too costly to repeat here", ""),
        *markdown_table((*heads, "what it would take"), not_afforded),
        *("", "## Without a published figure", ""),
        *markdown_table(("recipe", "why"), reasons),
    ]
    return "\n".join([*lines, ""])
