"""Every recipe in other people's tools: what is right, what is refused, what fails and, above all, what is wrong.

    python benchmarks/in_other_tools.py                     # all recipes in all columns
    python benchmarks/in_other_tools.py --recipes llama bert --columns "second derivative"
    python benchmarks/in_other_tools.py --share 3/20        # each cell is in one of 20 shares in a row, or of 40
    python benchmarks/in_other_tools.py --missing           # goes on where it was interrupted

Each cell is a process of its own with a tiny model and a limit of time. `right` is equality with the plain model in
float32, to 1e-5 of its largest number (half precision: to some percent); `refused` is a sentence of the library or of
the tool's author that says so; `error` is anything else that was raised, with its last words; `wrong` is a result that
differs. Results are kept in `docs/in_other_tools.json`, from which `docs/make.py` makes a page; the exit code is 1 if a
cell of a run is wrong, or raises where it was right or refused.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from other_tools.cells import COLUMNS, ToolCell, import_tools

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "in_other_tools.json"
SECONDS = 120.0
COSTLY = {"compile", "ONNX"}
"""Columns of some ten seconds a cell, of which a share has half as many."""
ORDER = ("wrong", "error", "slow", "skipped", "refused", "right")
"""From the worst result to the best."""


def main(words: list[str] | None = None) -> int:
    """Compute cells, keep them and say what is worse; returns the exit code."""
    options = parser().parse_args(words)
    import manyformer as mf

    recipes = options.recipes or sorted(mf.recipes())
    columns = options.columns or list(COLUMNS)
    if unknown := sorted({*recipes} - {*mf.recipes()}) + sorted({*columns} - {*COLUMNS}):
        sys.exit(f"there is no {', '.join(unknown)}; columns are {', '.join(COLUMNS)}")
    kept: dict[str, dict[str, Any]] = {}
    if options.file.exists():
        kept = json.loads(options.file.read_text(encoding="utf-8"))
    import_tools(recipes, columns)
    commit = (
        options.commit
        or subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip()
    )
    worse = []
    counts: Counter[str] = Counter()
    costs: Counter[str] = Counter()
    for name in recipes:
        for column in columns:
            is_kept = column in kept.get(name, {})
            if not is_in_share(name, column, options.share) or (options.missing and is_kept):
                continue
            before = processor_time()
            result = ToolCell(name, column).run(options.seconds)
            seconds = processor_time() - before
            costs[column] += seconds
            counts[result["result"]] += 1
            earlier = kept.get(name, {}).get(column)
            # a slower machine or a package that is missing is nothing worse
            has_failed = result["result"] == "error" and earlier and earlier["result"] in ("right", "refused")
            if result["result"] == "wrong" or has_failed:
                worse.append(f"{name} in {column}: {result}")
            if result["result"] != "right" or options.verbose:
                print(f"{name:28s} {column:20s} {result} {seconds:.1f} s", flush=True)
            if not options.check:
                kept.setdefault(name, {})[column] = result | {"commit": commit}
        if not options.check:
            keep(kept, options.file)
    print(", ".join(f"{counts[result]} {result}" for result in ORDER if counts[result]))
    print("seconds of processor time:", ", ".join(f"{column} {seconds:.0f}" for column, seconds in costs.most_common()))
    for line in worse:
        print(f"worse than it was: {line}")
    return bool(worse)


def processor_time() -> float:
    """Seconds of processor time of all cells until now."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", metavar="NAME")
    parser.add_argument("--columns", nargs="+", metavar="COLUMN", help=", ".join(COLUMNS))
    parser.add_argument("--share", metavar="K/N", help="the cells of share number K alone")
    parser.add_argument("--file", type=Path, default=FILE, help="where results are kept")
    parser.add_argument("--check", action="store_true", help="compare with what is kept, and keep nothing")
    parser.add_argument("--missing", action="store_true", help="cells alone that are not kept yet")
    parser.add_argument("--commit", help="what the results are of [what git says]")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"the limit of a cell [{SECONDS:g}]")
    parser.add_argument("--verbose", action="store_true", help="say what is right, too")
    return parser


def is_in_share(name: str, column: str, share: str | None) -> bool:
    """Whether a cell is in a share K/N, the same on every machine; each is in one of N, or of 2 N, shares in a row."""
    if share is None:
        return True
    number, _, total = share.partition("/")
    shares = int(total) * (2 if column in COSTLY else 1)
    return zlib.crc32(f"{name} {column}".encode()) % shares == int(number) % shares


def keep(results: dict[str, dict[str, Any]], file: Path) -> None:
    """Write all results, one recipe a line."""
    ordered = {name: {c: results[name][c] for c in COLUMNS if c in results[name]} for name in sorted(results)}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in ordered.items())
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    draft.replace(file)


if __name__ == "__main__":
    sys.exit(main())
