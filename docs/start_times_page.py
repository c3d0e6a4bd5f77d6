"""The page of how long commands take to answer, from the record of benchmarks/start_times.py."""

import json
from pathlib import Path

RECORD = Path(__file__).parent / "start_times.json"


def start_times_page(mark: str) -> str:
    """A table of the commands with their seconds."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    lines = [mark, "# How fast commands start", ""]
    lines += [
        "Seconds from the shell to the end of the answer, the least of "
        f"{record['rounds']} round(s) with one thread ({record['machine']}, Python {record['python']}, load "
        f"{record['load']:.1f}; a busy machine makes the wall longer): `python benchmarks/start_times.py`. "
        "The goal is 1 s where torch is not needed and 2.5 s where it is. Commands that describe or plan a model "
        "without its weights compute on torch's meta device, whose first use loads torch's compiler, which takes most "
        "of their time beyond that of `import torch`.",
        "",
        "| command | needs torch | s of the processor | s of the wall | within the goal |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in record["commands"]:
        goal = 2.5 if row["needs_torch"] else 1.0
        needs = "yes" if row["needs_torch"] else "no"
        within = "yes" if row["processor"] <= goal else "no"
        lines.append(f"| `{row['command']}` | {needs} | {row['processor']:.2f} | {row['wall']:.2f} | {within} |")
    return "\n".join(lines) + "\n"
