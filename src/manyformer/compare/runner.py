"""Carrying out a comparison: every case with every seed, each kept as soon as it is measured."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from manyformer.compare.comparison_report import CaseMeasurement
from manyformer.compare.progress import ProgressMeter
from manyformer.compare.scoring import Rescorer, RescoreResult
from manyformer.config import RUN_FILE, RunConfig
from manyformer.config.comparison import Comparison, ComparisonCase
from manyformer.errors import UserError
from manyformer.model_summary import count_parameters
from manyformer.train import TrainingDiverged, train
from manyformer.train.durable_files import replace_text
from manyformer.train.metrics import read_rows
from manyformer.train.run_folder import as_run

MEASURED = "measured.json"

ELSEWHERE = {"out", "log", "save", "track", "device"}
"""Sections of a run that change nothing that is measured."""


class ComparisonRunner:
    """Trains and scores the cases below `folder`; what is there already is taken as it is."""

    def __init__(self, comparison: Comparison, folder: Path, seeds: int) -> None:
        self.comparison, self.folder, self.seeds = comparison, folder, seeds
        self._folders = _folder_names([case.name for case in comparison.cases])

    def go(self, meter: ProgressMeter) -> Iterator[CaseMeasurement]:
        """Everything, in the order of work: one seed of all cases after the other."""
        stage = self.comparison.stage
        cases = sorted(self.comparison.cases, key=lambda case: (case.trained_by is not None, stage(case)))
        for seed in range(self.seeds):
            for case in cases:
                yield self._measured(case, seed, meter)

    def check(self) -> None:
        """Raise UserError where a folder holds a training with other settings."""
        for case in self.comparison.cases:
            for seed in range(self.seeds):
                run = self.run(case, seed)
                assert run.out is not None
                file = Path(run.out) / RUN_FILE
                if (
                    case.trained_by is None
                    and file.is_file()
                    and _key(_named(case, as_run(file))) != _key(_named(case, run))
                ):
                    raise UserError(
                        f"{file.parent} was trained with other settings or another budget; choose another --out, or "
                        "start over with --fresh"
                    )

    def missing(self) -> int:
        """How many trainings are not measured yet."""
        return sum(
            self._kept(case, seed) is None
            for case in self.comparison.cases
            for seed in range(self.seeds)
            if case.trained_by is None
        )

    def run(self, case: ComparisonCase, seed: int) -> RunConfig:
        """The run of a case with a seed, in a folder of its own."""
        out = self.folder / self._folders[case.name] / f"seed-{case.run.seed + seed}"
        start = (
            case.run.start
            if case.init_from_case is None
            else self.run(self.comparison.case(case.init_from_case), seed).out
        )
        return case.run.model_copy(update={"seed": case.run.seed + seed, "out": str(out), "start": start})

    def _measured(self, case: ComparisonCase, seed: int, meter: ProgressMeter) -> CaseMeasurement:
        kept = self._kept(case, seed)
        return self._measure(case, seed, meter) if kept is None else kept

    def _measure(self, case: ComparisonCase, seed: int, meter: ProgressMeter) -> CaseMeasurement:
        run, name = self.run(case, seed), f"{case.name}, seed {case.run.seed + seed}"
        assert run.out is not None
        trained = run if case.trained_by is None else self.run(self.comparison.case(case.trained_by), seed)
        assert trained.out is not None
        try:
            if case.trained_by is None:
                train(run, on_event=meter.listener(name))
            scorer = Rescorer(Path(trained.out), trained, self.comparison.file.score, self.comparison.file.split)
            found = list(self._score(scorer, case, name, run.seed, meter))
            parameters = count_parameters(scorer.model)
        except TrainingDiverged as error:
            # a result like others: nothing is learned this way
            nothing = dict.fromkeys(self.comparison.file.score)
            found, parameters = [RescoreResult(nothing, f"seed {run.seed}: {error}")] * len(case.points), None
        effort = _effort(Path(trained.out))
        scores, why = tuple(one.scores for one in found), tuple(one.why for one in found)
        effort = effort if case.trained_by is None else effort._replace(minutes=None)
        measured = CaseMeasurement(case.name, run.seed, scores, why, *effort, parameters)
        self._keep(case, seed, measured)
        if case.trained_by is None:
            meter.ended(f"{name}: {self._in_words(measured)}")
        return measured

    def _score(
        self, scorer: Rescorer, case: ComparisonCase, name: str, seed: int, meter: ProgressMeter
    ) -> Iterator[RescoreResult]:
        for value, point in zip(self.comparison.values, case.points, strict=True):
            meter.glimpse(f"{name}: scoring" + ("" if value is None else f" at {value}"), 1.0)
            yield scorer(None if point is None else point.model_copy(update={"seed": seed}))

    def _in_words(self, measured: CaseMeasurement) -> str:
        first = self.comparison.file.score[0]
        values = [scores[first] for scores in measured.scores]
        return f"{first} {', '.join('none' if value is None else f'{value:.4g}' for value in values)}"

    def _kept(self, case: ComparisonCase, seed: int) -> CaseMeasurement | None:
        """What was measured before, where it was for exactly this."""
        run = self.run(case, seed)
        assert run.out is not None
        try:
            found = json.loads((Path(run.out) / MEASURED).read_text(encoding="utf-8"))
            if found.pop("key") != self._question(case, seed):
                return None
            return CaseMeasurement(**{**found, "scores": tuple(found["scores"]), "why": tuple(found["why"])})
        except (OSError, ValueError, KeyError, TypeError):
            # missing, half written or of another time: measured again, from the trained model where there is one
            return None

    def _keep(self, case: ComparisonCase, seed: int, measured: CaseMeasurement) -> None:
        run = self.run(case, seed)
        assert run.out is not None
        Path(run.out).mkdir(parents=True, exist_ok=True)
        content = {"key": self._question(case, seed), **asdict(measured)}
        replace_text(Path(run.out) / MEASURED, json.dumps(content, indent=1) + "\n")

    def _question(self, case: ComparisonCase, seed: int) -> str:
        """Equal where the same is asked: the run, what it is scored by and under which settings."""
        trained = None if case.trained_by is None else self._training(self.comparison.case(case.trained_by), seed)
        points = [None if point is None else _key(point) for point in case.points]
        file = self.comparison.file
        return _hash([self._training(case, seed), trained, points, file.score, file.split])

    def _training(self, case: ComparisonCase, seed: int) -> Any:
        """Equal where the same is trained, after the same."""
        key = _key(_named(case, self.run(case, seed)))
        return (
            key
            if case.init_from_case is None
            else [self._training(self.comparison.case(case.init_from_case), seed), key]
        )


def _named(case: ComparisonCase, run: RunConfig) -> RunConfig:
    """The run, which begins with what the case says, wherever that lies."""
    return run if case.init_from_case is None else run.model_copy(update={"start": case.init_from_case})


def _key(run: RunConfig) -> str:
    return _hash(run.model_dump(mode="json", exclude=ELSEWHERE))


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


class _Effort(NamedTuple):
    """What went into a training."""

    minutes: float | None
    steps: int
    tokens: int


def _effort(folder: Path) -> _Effort:
    """What went into a training, by its metrics."""
    rows = list(read_rows(folder / "metrics.jsonl"))
    return _Effort(rows[-1]["seconds"] / 60, rows[-1]["step"], rows[-1]["tokens"]) if rows else _Effort(None, 0, 0)


def _folder_names(cases: list[str]) -> dict[str, str]:
    """A plain folder's name for each case, no two alike."""
    names: dict[str, str] = {}
    for case in cases:
        plain = re.sub(r"[^a-z0-9]+", "-", case.lower()).strip("-") or "case"
        number, name = 1, plain
        while name in names.values():
            number, name = number + 1, f"{plain}-{number + 1}"
        names[case] = name
    return names
