"""The page of what four new users did, from the record of benchmarks/first_minutes.py."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "first_minutes.json"
HEADER = "| user | commands | own minutes | goal | minutes of the machine | reached |"


def first_minutes_page(mark: str) -> str:
    """Tables of the four users, now and with version 0.2.0, and the commands of each with what was not as promised."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    lines = [mark, "# The first minutes", ""]
    lines += [
        "Four people who see the package for the first time, each with a goal: `python benchmarks/first_minutes.py` "
        "types in a fresh folder what README and the pages say, and looks whether every command ends and speaks as its "
        "page says. *Own minutes* are those of a person: reading the prose of the sections that the commands stand in "
        "and what the commands print, at 200 words a minute (of the last command up to the line that answers; a line "
        "that differs from an earlier one in numbers alone is read once), and typing at 200 characters a minute. The "
        "machine's minutes stand beside them. Reading was counted, not watched: nobody was timed. The texts of all "
        "commands are in `first_minutes.json`.",
        "",
    ]
    for column, title in (("now", "Now"), ("before", "With version 0.2.0 and its own pages")):
        if column in record:
            lines += list(_table(title, record[column]))
    return "\n".join(lines) + "\n"


def _table(title: str, column: dict[str, Any]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield f"{column['machine']}, load {column['load']} from other work, which lengthens the machine's minutes."
    yield ""
    yield HEADER
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    for user in column["users"]:
        reached = "yes" if user["reached"] else "no"
        cells = (user["user"], user["commands"], user["own_minutes"], user["most_own_minutes"], user["machine_minutes"])
        yield f"| {' | '.join(map(str, cells))} | {reached} |"
    yield ""
    for user in column["users"]:
        yield f"**{user['user'][0].upper()}{user['user'][1:]}**: {user['goal']}."
        yield ""
        for step in user["steps"]:
            faults = "; ".join(step["faults"])
            line = f"- `{step['command']}`: {step['seconds']} s, {step['words']} words"
            yield f"{line}; **{faults}**" if faults else line
        yield ""
