"""After how many steps and seconds each case of a comparison has the final loss of another one.

`python benchmarks/steps_to_loss.py FOLDER REFERENCE` reads the trainings that `manyformer compare` has kept in FOLDER.
Of each case it takes the trial with the lowest final validation loss of the first seed, and all seeds of it. The target
of a seed is the final loss of REFERENCE with that seed; between two evaluations the loss is taken to fall evenly."""

import json
import statistics
import sys
from pathlib import Path
from typing import NamedTuple


class Evaluation(NamedTuple):
    step: int
    seconds: float
    loss: float


def evaluations(training: Path) -> list[Evaluation]:
    """The validation losses of a training, in order."""
    rows = [json.loads(line) for line in (training / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [Evaluation(row["step"], row["seconds"], row["valid_loss"]) for row in rows if "valid_loss" in row]


def chosen_trainings(case: Path) -> list[list[Evaluation]]:
    """The evaluations of all seeds of the best trial of a case."""
    first_seeds = sorted(case.rglob("seed-0/metrics.jsonl"))
    best = min((file.parent for file in first_seeds), key=lambda training: evaluations(training)[-1].loss)
    return [evaluations(file.parent) for file in sorted(best.parent.glob("seed-*/metrics.jsonl"))]


def when_reached(training: list[Evaluation], target: float) -> tuple[float, float] | None:
    """The step and the second at which the loss first is `target`; None if it never is."""
    before = None
    for point in training:
        if point.loss <= target:
            if before is None:
                return float(point.step), point.seconds
            share = (before.loss - target) / (before.loss - point.loss)
            seconds = before.seconds + share * (point.seconds - before.seconds)
            return before.step + share * (point.step - before.step), seconds
        before = point
    return None


def spread(numbers: list[float], digits: int) -> str:
    """The mean of numbers, and the least and the largest."""
    return f"{statistics.fmean(numbers):.{digits}f} ({min(numbers):.{digits}f} to {max(numbers):.{digits}f})"


def main(folder: Path, reference: str) -> None:
    cases = {
        case.name: chosen_trainings(case)
        for case in sorted(folder.iterdir())
        if any(case.rglob("seed-0/metrics.jsonl"))
    }
    if reference not in cases:
        sys.exit(f"{folder} has no trained case {reference}, but {', '.join(cases)}")
    targets = [training[-1].loss for training in cases[reference]]
    seconds = statistics.fmean(training[-1].seconds for training in cases[reference])
    steps = cases[reference][0][-1].step
    print(
        f"target: the final losses of {reference}, {spread(targets, 4)} nats after {steps:,} steps, {seconds:.0f} s\n"
    )
    print("| case | seeds | final loss | steps to the target | share | seconds to the target | ms a step |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, trainings in cases.items():
        # a case may have been trained with fewer seeds so far
        pairs = zip(trainings, targets, strict=False)
        reached = [point for training, target in pairs if (point := when_reached(training, target)) is not None]
        loss = spread([training[-1].loss for training in trainings], 4)
        step_time = 1e3 * statistics.fmean(training[-1].seconds / training[-1].step for training in trainings)
        if len(reached) < len(trainings):
            missing = len(trainings) - len(reached)
            print(f"| {name} | {len(trainings)} | {loss} | not reached by {missing} | | | {step_time:.1f} |")
            continue
        share = statistics.fmean(step for step, _ in reached) / steps
        by_step = spread([step for step, _ in reached], 0)
        by_time = spread([time for _, time in reached], 0)
        print(f"| {name} | {len(trainings)} | {loss} | {by_step} | {share:.0%} | {by_time} | {step_time:.1f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
