"""Write down what a change of the code must leave as it is, and compare two commits by it.

    python benchmarks/same_results.py write old.json --source ../before/src    # another checkout
    python benchmarks/same_results.py write new.json                           # this one
    python benchmarks/same_results.py compare old.json new.json
    python benchmarks/same_results.py time ../before/src src                   # paired timings of the main jobs
    python benchmarks/same_results.py time ../before/src src --jobs "step of" window --seconds 300    # of some of them

`write` keeps, for every recipe at its test size, digests of logits and all numbers of 20 training steps, with dropout
too, losses in float64, cached passes and generated tokens (`recipes`); public names, signatures, settings, commands
with their help (`interface`); what every command says and writes on tiny runs, without times (`commands`); and, where
`--only choices` asks for it, each recipe with each choice of a keyword that its signature lists. Some minutes of one
thread for each. What is there already is kept, so an interrupted `write` goes on; `--recipes` and `--again` write parts
of it anew. Sources are of one state: a file of other sources is refused.

`compare` names each difference and says how far the numbers are apart; its exit code is 1 if there is one. Digests are
of one machine and one torch: write both files on the same one.

`time` prints a row for each job when it is there, and keeps to `--seconds`: fewer rounds, then jobs that are not timed.

A checkout that has this script itself is written by its own, and timed by the jobs of its own, which know the names of
its modules.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sameness import paired_times
from sameness.comparison import differences
from sameness.paired_times import HEADER, compare_jobs, environment_of, script_of, use_sources, work

ROOT = Path(__file__).parents[1]
SECTIONS = ("recipes", "interface", "commands", "choices")
USUAL = ("recipes", "interface", "commands")
ROUNDS = 12
SECONDS = 900.0


def main(words: list[str] | None = None) -> int:
    """Write, compare or time; returns the exit code."""
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["_work"]:
        work(Path(words[1]))
        return 0
    options = parser().parse_args(words)
    verbs: dict[str, Callable[[argparse.Namespace], int]] = {"write": write, "compare": compare, "time": time}
    return verbs[options.verb](options)


def parser() -> argparse.ArgumentParser:
    """The options of the three verbs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    writing = verbs.add_parser("write", help="write the state of the sources to a file")
    writing.add_argument("file", type=Path)
    writing.add_argument("--source", type=Path, default=ROOT / "src", help="the folder with the package [src]")
    writing.add_argument("--only", nargs="+", choices=SECTIONS, default=USUAL, help=f"[{' '.join(USUAL)}]")
    writing.add_argument("--recipes", nargs="+", metavar="NAME", help="of these recipes alone")
    writing.add_argument("--again", action="store_true", help="write anew what the file has already")
    comparing = verbs.add_parser("compare", help="say what differs between two files")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    timing = verbs.add_parser("time", help="time the main jobs of two checkouts in turns")
    timing.add_argument("old", type=Path, metavar="OLD_SRC")
    timing.add_argument("new", type=Path, metavar="NEW_SRC")
    timing.add_argument("--jobs", nargs="+", default=[], metavar="PART", help="jobs whose names contain one of these")
    timing.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"at most so many of each pair of processes [{ROUNDS}]"
    )
    timing.add_argument("--seconds", type=float, default=SECONDS, help=f"the time of all jobs together [{SECONDS:g}]")
    return parser


def write(options: argparse.Namespace) -> int:
    """Write in a process that imports the right sources alone, with one thread."""
    source = options.source.resolve()
    if not (source / "manyformer" / "__init__.py").is_file():
        sys.exit(f"{source} has no package manyformer: name the folder src of a checkout")
    environment = environment_of(source)
    if all(os.environ.get(name) == value for name, value in environment.items()):
        write_here(options, source)
        return 0
    command = [sys.executable, str(script_of(source)), *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, **environment}, check=False).returncode


def write_here(options: argparse.Namespace, source: Path) -> None:
    """Fill the sections of the file, which is kept after each part."""
    use_sources(source)
    import torch

    torch.set_num_threads(1)
    state = {
        "sources": digest_of_sources(source),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    record: dict[str, Any] = {"about": state}
    if options.file.exists():
        record = json.loads(options.file.read_text(encoding="utf-8"))
        if record["about"] != state:
            sys.exit(f"{options.file} is of other sources, or of another torch: {record['about']}; give another name")
    for section in options.only:
        fill(record.setdefault(section, {}), section, options, lambda: keep(record, options.file))
        print(f"{section}: {len(record[section])} entries in {options.file}", flush=True)


def fill(done: dict[str, Any], section: str, options: argparse.Namespace, keep: Callable[[], None]) -> None:
    """Add what a section lacks."""
    if section == "commands":
        from sameness.command_outputs import outputs

        # each command works on what earlier ones have left, so they are run all together
        outputs(done, keep)
        return
    if options.recipes and section == "interface":
        return
    for name, entry in entries(section):
        is_asked = options.recipes is None or name.split()[0] in options.recipes
        if is_asked and (options.again or name not in done):
            done[name] = entry()
            keep()


def entries(section: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The entries of a section with what computes them."""
    from functools import partial

    if section == "interface":
        from sameness import interface

        yield from interface.PARTS.items()
        return
    from sameness.recipe_numbers import choices, numbers_of_choice, numbers_of_recipe

    import manyformer as mf

    if section == "recipes":
        for name in sorted(mf.recipes()):
            yield name, partial(numbers_of_recipe, name)
    else:
        for name, variant in choices():
            yield name, partial(numbers_of_choice, variant)


def keep(record: Mapping[str, Any], file: Path) -> None:
    """Replace the file by one with all that there is now."""
    beside = file.with_name(f"{file.name}.part")
    beside.write_text(json.dumps(record, indent=0) + "\n", encoding="utf-8")
    beside.replace(file)


def digest_of_sources(source: Path) -> str:
    """A digest of every file of the package."""
    digest = hashlib.sha256()
    for path in sorted((source / "manyformer").rglob("*.py")):
        digest.update(str(path.relative_to(source)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def compare(options: argparse.Namespace) -> int:
    """Print every difference; 1 if there is one."""
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (options.old, options.new))
    for fact in ("torch", "python", "machine"):
        if old["about"][fact] != new["about"][fact]:
            print(f"note: {fact} was {old['about'][fact]} and is {new['about'][fact]}, so the last digits may differ")
    count = 0
    for section in options.only:
        if (section in old) != (section in new):
            print(f"{section}: only one of the files has it")
            continue
        found = list(differences(old.get(section, {}), new.get(section, {})))
        count += len(found)
        entries_apart = {difference.place[0] for difference in found}
        if section in old:
            print(f"{section}: {len(entries_apart)} of {len(old[section])} entries differ")
        for difference in found:
            print(f"  {' / '.join(difference.place)}: {difference.sentence}")
    return 1 if count else 0


def time(options: argparse.Namespace) -> int:
    """Print a line for each job as soon as it is there: ratios new to old with their quartiles, times and memory."""
    jobs = [job for job in paired_times.JOBS if not options.jobs or any(part in job for part in options.jobs)]
    if not jobs:
        sys.exit(f"no job has a name with one of {options.jobs}; there are {', '.join(paired_times.JOBS)}")
    for source in (options.old, options.new):
        if not (source / "manyformer" / "__init__.py").is_file():
            sys.exit(f"{source} has no package manyformer: name the folder src of a checkout")
    print(HEADER, flush=True)
    for row in compare_jobs(options.old, options.new, jobs, options.rounds, options.seconds):
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
