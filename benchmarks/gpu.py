"""All that only a GPU can show, with one command: correctness, compilation, speed, utilization and memory.

    python benchmarks/gpu.py                          # on a GPU: ten minutes, then say what is left
    python benchmarks/gpu.py                          # again: goes on with what is left and what failed
    python benchmarks/gpu.py --device cpu --tiny      # a rehearsal of the script on any machine

Every finished item is kept in `gpu.json`, and `gpu.md` is written from it. Items run in another process:
one that crashes or hangs fails, and the next one goes on. Numbers stand beside the path that computed them. The exit
code is 1 if anything failed, 3 if nothing failed but something is left to be run.
"""

import sys
import time
from pathlib import Path

import frame
import torch
from gpu_parts import PARTS, all_items
from gpu_parts.kept_results import KeptResults
from gpu_parts.outcome import Setting
from gpu_parts.page import page
from gpu_parts.workers import Workers

from manyformer.errors import UserError
from manyformer.files.atomic_files import atomic_write_text

ITEM_SECONDS = 240.0
FAILED, INCOMPLETE = 1, 3


def main(arguments: list[str] | None = None) -> int:
    """Run what is left within the time; returns the exit code."""
    parser = frame.argument_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: a rehearsal; a CPU has no other")
    parser.add_argument("--minutes", type=float, default=10, help="begin no item after so many minutes [10]")
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--out", default="gpu.json", help="where results are kept; the page has the suffix .md")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --device cpu --tiny rehearses the script")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: on a CPU this is a rehearsal")
    setting = Setting(torch.device(options.device), options.tiny)
    out = Path(options.out)
    if out.suffix != ".json":
        parser.error(f"--out ({out}) must end in .json")
    try:
        results = KeptResults(out, setting)
    except UserError as error:
        parser.error(str(error))
    names = [name for name in all_items(setting) if name.partition("/")[0] in options.only]
    run_remaining(setting, results, results.remaining(names), time.monotonic() + 60 * options.minutes)
    return report(results, names)


def run_remaining(setting: Setting, results: KeptResults, names: list[str], end: float) -> None:
    """Run the items one after the other, and keep each at once."""
    with Workers(setting) as workers:
        for number, name in enumerate(names):
            if time.monotonic() >= end:
                return
            item = workers.run(name, ITEM_SECONDS)
            results.add(name, item)
            print(f"{number + 1}/{len(names)} {item.verdict:<7} {name}: {item.sentence}", flush=True)


def report(results: KeptResults, names: list[str]) -> int:
    """Write the page, list what failed, and return the exit code."""
    left = [name for name in names if name not in results.items]
    failed = {name: item for name, item in results.items.items() if item.verdict == "failed"}
    where = results.path.with_suffix(".md")
    atomic_write_text(where, page(results.machine, results.items, left))
    print(f"\nwrote {results.path} and {where}")
    for name, item in failed.items():
        print(f"FAILED {name}: {item.sentence}")
    if left:
        print(f"{len(left)} of {len(names)} items are left: the same command goes on with them")
    return FAILED if failed else INCOMPLETE if left else 0


if __name__ == "__main__":
    sys.exit(main())
