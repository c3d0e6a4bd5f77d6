"""Comparisons in Python: cases are recipes, modules, or classes and functions that give them, on equal data.

The data are batches of the caller, which every case reads in the same order, or those that settings of a run name."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from torch import nn

from manyformer.analysis.comparisons.runner import ComparisonRunner, TrainingJob
from manyformer.analysis.comparisons.scoring import RescoreResult
from manyformer.analysis.comparisons.training_task import (
    MEASUREMENT_FILE,
    CaseMeasurement,
    MeasurementRecord,
    ReportActivity,
    TrainingTask,
)
from manyformer.base.errors import UserError
from manyformer.config import RunConfig
from manyformer.config.comparison import CaseTrial, Comparison, ComparisonCase, ComparisonFile
from manyformer.config.load import RunTarget, merge_run
from manyformer.config.setting_layers import SettingLayer
from manyformer.config.training_sections import BatchConfig
from manyformer.data.batching.given_feed import GivenSource, hash_of
from manyformer.models import Model
from manyformer.recipes.parts.model_summary import count_parameters
from manyformer.recipes.parts.own_modules import LossFn
from manyformer.recipes.parts.registry import build_on_meta
from manyformer.training import TrainingDiverged, train
from manyformer.training.events import TrainingEvent, TrainingProgress
from manyformer.training.given_training import GivenModel, GivenTraining, as_given_model, run_of
from manyformer.training.run_folder import recipe_lookup

Cases = Mapping[str, Any] | Sequence[Any]
"""Cases by name, or in a list, where recipes and classes name them."""


@dataclass(frozen=True)
class GivenCase:
    """A case: the recipe's name, module, class or function that it trains, and its settings over those of all."""

    name: str
    source: Any
    settings: Mapping[str, Any] = field(default_factory=dict)

    def model(self, loss_fn: LossFn | None) -> GivenModel:
        """The model of a training, which leaves the object that was given as it is."""
        is_built = isinstance(self.source, nn.Module)
        source = copy.deepcopy(self.source) if is_built else self.source
        is_ours = isinstance(source, Model | str)
        return as_given_model(source, None if is_ours else loss_fn, label=self.name)


@dataclass(frozen=True)
class GivenBatches:
    """The batches of a comparison, and the loss of modules that give no logits of classes."""

    train: Any
    held_out: Any
    loss_fn: LossFn | None = None


def read_cases(cases: Cases) -> list[GivenCase]:
    """The cases by name. Raises UserError for a list in which two have the same name."""
    if isinstance(cases, Mapping):
        named = list(cases.items())
    else:
        named = [(_name_of(case), case) for case in cases]
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not names:
        raise UserError(
            f"{f'two cases are called {twice[0]}' if twice else 'there are no cases'}; give a dict of names"
        )
    read = []
    for name, case in named:
        if not isinstance(case, Mapping):
            read.append(GivenCase(name, case))
        elif "recipe" in case:
            read.append(GivenCase(name, case["recipe"], {key: value for key, value in case.items() if key != "recipe"}))
        else:
            raise UserError(f"the case {name} needs a recipe: a name, a module, or a class that gives one")
    return read


def _name_of(case: Any) -> str:
    if isinstance(case, Mapping):
        return _name_of(case.get("recipe"))
    if isinstance(case, str):
        return case
    if isinstance(case, Model) and hasattr(case, "spec"):
        return case.spec.recipe
    kind = case if inspect.isclass(case) or inspect.isfunction(case) else type(case)
    return kind.__name__


def python_comparison(
    cases: Sequence[GivenCase],
    overrides: Sequence[str] | Mapping[str, Any],
    data: GivenBatches | None,
    *,
    title: str,
    score: Sequence[str],
) -> Comparison:
    """The comparison of cases on given data, or on that of their settings. Raises UserErrors."""
    runs = {case.name: _run_of(case, overrides, data) for case in cases}
    costs = ("parameters", "minutes", "tokens")
    file = ComparisonFile.model_validate({"title": title, "score": tuple(score), "cost": costs})
    members = [ComparisonCase(name, (CaseTrial("", run, (run,)),), None) for name, run in runs.items()]
    return Comparison("python", "", file, tuple(members))


def _run_of(case: GivenCase, overrides: Sequence[str] | Mapping[str, Any], data: GivenBatches | None) -> RunConfig:
    if data is not None:
        model = case.model(data.loss_fn)
        run = run_of(model, overrides, case.settings)
        section = run.data.model_copy(update={"fingerprint": _fingerprint(case, data, model)})
        return run.model_copy(update={"data": section})
    if isinstance(case.source, Model):
        raise UserError(f"the case {case.name} is a built model, which needs data= of batches; give its recipe's name")
    recipe = case.source
    if not isinstance(recipe, str):
        recipe = case.model(None).name
    layer = SettingLayer({**case.settings, "recipe": recipe})
    run = merge_run(RunTarget(case.name, [layer], []), overrides, recipe_lookup())
    # a mistake in the sizes of a model is told before another one is trained
    build_on_meta(run.recipe, run.model)
    return run


def _fingerprint(case: GivenCase, data: GivenBatches, model: GivenModel) -> str:
    """A hash of the first batch of the data and of what the model is made of."""
    batches = []
    for part in (data.train, data.held_out):
        source = GivenSource(part, BatchConfig().tokens, 0, shuffle=False)
        if source.is_read_once:
            raise UserError("data can be read only once, and each case reads it: give a list, or a function")
        batches.append([next(source.batches(0, 0), None), source.length])
    return hash_of([*batches, str(case.source) if isinstance(case.source, nn.Module) else model.name])


@final
class GivenRunner(ComparisonRunner):
    """The trainings of a comparison whose models and data are objects of this process."""

    def __init__(
        self, comparison: Comparison, folder: Path, seeds: int, cases: Sequence[GivenCase], data: GivenBatches
    ) -> None:
        super().__init__(comparison, folder, seeds)
        self._cases_by_name = {case.name: case for case in cases}
        self._data = data

    def task(self, job: TrainingJob) -> TrainingTask:
        task = super().task(job)
        return GivenTask(**vars(task), source=self._cases_by_name[job.case], data=self._data)


@dataclass(frozen=True)
class GivenTask(TrainingTask):
    """One training of a case on given data; its scores are those of the final weights."""

    source: GivenCase = field(kw_only=True)
    data: GivenBatches = field(kw_only=True)

    def measure(self, report: ReportActivity = lambda activity, share: None) -> CaseMeasurement:
        """Train, or resume, and score the model; the measurement is saved at once."""

        def on_event(event: TrainingEvent) -> None:
            if isinstance(event, TrainingProgress):
                report(f"{self.name}: step {event.step}, loss {event.loss:.3f}", event.progress)

        model = self.source.model(self.data.loss_fn)
        training = GivenTraining(model, self.run, self.data.train, self.data.held_out)
        parameters = None
        reason = None
        values: dict[str, float | None] = dict.fromkeys(self.scores)
        try:
            result = train(training, on_event=on_event)
            # in per cent, as the scores of other comparisons
            scores = {name: value * (100 if name == "accuracy" else 1) for name, value in result.scores.items()}
            values = {name: scores.get(name) for name in self.scores}
            assert training.model is not None
            parameters = count_parameters(training.model)
        except TrainingDiverged as error:
            reason = f"seed {self.run.seed}: {error}"
        measurement = self._measurement(self.folder, [RescoreResult(values, reason)], parameters, None)
        MeasurementRecord(key=self.key, measurement=measurement).write(self.folder / MEASUREMENT_FILE)
        return measurement
