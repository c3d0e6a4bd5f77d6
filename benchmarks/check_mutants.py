"""What `check` finds: sixty models with one fault each must be red, with its place, and forty odd sound ones green.

    python benchmarks/check_mutants.py
    python benchmarks/check_mutants.py --seeds 0 1 2 3 4
    python benchmarks/check_mutants.py --only "key dropped" "sorted buckets" --table

The models are those of tests/analysis/contracts: plain PyTorch of five kinds in thirteen forms of call. A mutant counts
as found if a row is red, and its place as named if the report tells what the fault is about: a contract that is for it,
and for leaks of one module also the module's name, and the position where a single one is read.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import manyformer as mf
from manyformer.analysis.contracts import CheckReport
from manyformer.base.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "analysis" / "contracts"))
from strange_faults import Mutant, draw_mutants, names_place
from strange_sound import SoundModel, draw_sound

LEFT_OUT = ("compile",)
"""Contracts that take seconds each and that no fault is about."""


@dataclass(frozen=True)
class Result:
    """One model: the red rows, whether the place is named, and the seconds; `refused` says why it was not checked."""

    model: Mutant | SoundModel
    report: CheckReport | None
    seconds: float
    refused: str = ""

    @property
    def red(self) -> bool:
        return self.report is not None and not self.report.ok

    @property
    def place_named(self) -> bool:
        return isinstance(self.model, Mutant) and self.report is not None and names_place(self.report, self.model)


def check_model(model: Mutant | SoundModel, *, seed: int) -> Result:
    """Check one model with all default contracts, as a stranger would."""
    start = time.process_time()
    try:
        report = mf.check(model.build(), seed=seed, skip=LEFT_OUT)
    except UserError as error:
        return Result(model, None, time.process_time() - start, str(error))
    return Result(model, report, time.process_time() - start)


def check_all(seed: int, only: Sequence[str], *, twins: bool) -> Iterator[Result]:
    """The results of all models of a seed, or of those whose name, kind or form is among `only`."""
    mutants = draw_mutants(seed)
    models: list[Mutant | SoundModel] = [*mutants, *draw_sound(seed)]
    if twins:
        models = [SoundModel(f"{m.name} without {m.fault}, {m.form}", m.kind, m.build_sound) for m in mutants]
    for model in models:
        names = {model.name, model.kind}
        if isinstance(model, Mutant):
            names |= {model.fault, model.form, "mutants"}
        else:
            names.add("sound")
        if not only or names & set(only):
            yield check_model(model, seed=seed)


def line(result: Result) -> str:
    """One line of the table."""
    model = result.model
    if isinstance(model, Mutant):
        title = f"{model.name} {model.fault}, {model.kind}, {model.form}, {model.module} {model.detail}"
        good = result.red
    else:
        title = f"sound: {model.name}, {model.kind}"
        good = not result.red
    verdict = "red" if result.red else "green"
    if result.refused:
        verdict = "refused"
    mark = "ok " if good else "BAD"
    if isinstance(model, Mutant) and good and not result.place_named:
        mark = "PLACE"
    lines = [f"{mark:6}{verdict:8}{result.seconds:5.1f} s  {title.strip()}"]
    if result.refused:
        lines.append(f"      {result.refused}")
    elif result.report is not None:
        for row in result.report.failed[:4]:
            lines.append(f"      {row.contract}: {row.sentence}")
            if row.place is not None:
                lines.append(f"        {row.place.where}, token {row.place.token}, output {row.place.output}")
    return "\n".join(lines)


def totals(results: Sequence[Result], seed: int) -> str:
    """The counts of a seed."""
    mutants = [result for result in results if isinstance(result.model, Mutant)]
    sound = [result for result in results if isinstance(result.model, SoundModel)]
    seconds = [result.seconds for result in results] or [0.0]
    return (
        f"seed {seed}: {sum(r.red for r in mutants)} of {len(mutants)} mutants red, "
        f"{sum(r.place_named for r in mutants)} with their place; {sum(r.red for r in sound)} of {len(sound)} sound "
        f"models red, {sum(bool(r.refused) for r in sound)} refused; "
        f"median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=[], help="names, faults, kinds, forms, 'mutants' or 'sound'")
    parser.add_argument("--twins", action="store_true", help="the mutants' models without their faults instead")
    parser.add_argument("--table", action="store_true", help="print whole reports")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    missed = False
    for seed in arguments.seeds:
        results = []
        for result in check_all(seed, arguments.only, twins=arguments.twins):
            results.append(result)
            missed = missed or result.red is not isinstance(result.model, Mutant)
            print(line(result), flush=True)
            if arguments.table and result.report is not None:
                print(result.report.table())
        print(totals(results, seed), flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
