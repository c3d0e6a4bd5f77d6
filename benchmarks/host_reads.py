"""Count how often each recipe makes Python wait for a GPU, on a device that tensors of the CPU pretend to be.

    python benchmarks/host_reads.py                     # count, and print what is not as docs/host_reads.json says
    python benchmarks/host_reads.py --write             # write what was found, then the page of docs/
    python benchmarks/host_reads.py bert mixtral --write   # of these recipes alone

No GPU is needed, nor used. A place that waits for the first time gets an empty reason: write it into the file.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import manyformer as mf  # noqa: E402
from pretended_device import stated_reads  # noqa: E402 - a package of the tests
from pretended_device.recipe_jobs import JobResult, run_pretended  # noqa: E402


def main() -> None:
    """Count for all recipes or those named, and compare or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--write", action="store_true", help="write docs/host_reads.json and the page that shows it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stated: dict[str, Any] = {job: {} for job in stated_reads.COUNTED_JOBS} | {"reasons": {}}
    if stated_reads.FILE.exists():
        stated = stated_reads.read()
    for recipe in arguments.recipes or sorted(mf.recipes()):
        for job in stated_reads.COUNTED_JOBS:
            result = run_pretended(recipe, job)
            waits = result.waits if isinstance(result, JobResult) else {}
            if sentence := stated_reads.difference(recipe, job, waits, stated):
                print(sentence, flush=True)
            stated[job].pop(recipe, None)
            if waits:
                stated[job][recipe] = stated_reads.as_json(waits)
    if arguments.write:
        write(stated)


def write(stated: dict[str, Any]) -> None:
    """Write the file, with a reason for each place that waits and for no other, and the page that follows from it."""
    for job in stated_reads.COUNTED_JOBS:
        stated[job] = dict(sorted(stated[job].items()))
    places = sorted({wait.partition(":")[0] for wait in _waits(stated)})
    stated["reasons"] = {place: stated["reasons"].get(place, "") for place in places}
    stated_reads.FILE.write_text(json.dumps(stated, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {stated_reads.FILE}; places without a reason: {[p for p, r in stated['reasons'].items() if not r]}")
    sys.path.insert(0, str(ROOT / "docs"))
    import make

    sys.argv = ["make.py"]
    make.main()


def _waits(stated: dict[str, Any]) -> Iterator[str]:
    for job in stated_reads.COUNTED_JOBS:
        for waits in stated[job].values():
            yield from waits


if __name__ == "__main__":
    main()
