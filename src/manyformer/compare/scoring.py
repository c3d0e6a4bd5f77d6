"""Scoring a trained model once more, under other settings than it was trained with."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from manyformer.api import load
from manyformer.batches import Batch
from manyformer.config import EvaluateConfig, RunConfig, SyntheticData, TextData, longest_row
from manyformer.data import OpenedData, load_tokenizers, open_data
from manyformer.data.epochs import HeldOutBatches
from manyformer.errors import UserError, nearest
from manyformer.evaluate import EvaluationSettings
from manyformer.evaluate.eval_data import split_of
from manyformer.evaluate.tasks import TASKS, Ask
from manyformer.models import BatchScore, LanguageModel, Model
from manyformer.models.carried_state import CarriedState
from manyformer.models.model_files import read_weights
from manyformer.recipes import build, get_recipe
from manyformer.train.build_model import choose_autocast, choose_device
from manyformer.train.objective import TrainingObjective, to_device
from manyformer.train.process_group import ALONE
from manyformer.train.validation import Validator
from manyformer.view.token_work import mean_span, mean_steps


class ScoreKind(NamedTuple):
    """How a score is told: its unit or nothing, whether less of it is better, and how many digits it deserves."""

    unit: str = ""
    less: bool = False
    digits: int = 2


LIKELIHOOD = {
    "loss": ScoreKind("nats", less=True, digits=3),
    "accuracy": ScoreKind("%"),
    "perplexity": ScoreKind(less=True),
    "bits_per_byte": ScoreKind(less=True, digits=3),
}
"""What the likelihood of the held-out data gives, for every task."""

EVALUATED: dict[str, dict[str, ScoreKind]] = {
    "language-model": {
        "bits_per_character": ScoreKind(less=True, digits=4),
        "steps": ScoreKind(less=True),
        "span": ScoreKind("tokens", less=True, digits=1),
    },
    "translation": {"bleu": ScoreKind(), "chrf": ScoreKind(), "ter": ScoreKind(less=True), "exact": ScoreKind("%")},
    "classification": {"macro_f1": ScoreKind("%"), "micro_f1": ScoreKind("%")},
    "image-classification": {"macro_f1": ScoreKind("%"), "micro_f1": ScoreKind("%")},
}
"""What `manyformer evaluate` computes besides, by task; and what a model counts of its own work."""

COUNTED = ("steps", "span")
"""The steps (or layers) that a scored token takes on average, and the mean span of all heads; where there are any."""


def kind_of(score: str) -> ScoreKind:
    """How this score is told. Raises UserError for a score that nobody knows."""
    known = LIKELIHOOD | {name: kind for kinds in EVALUATED.values() for name, kind in kinds.items()}
    if score not in known:
        raise UserError(f"there is no score '{score}'; {nearest(score, known)}")
    return known[score]


def check_score(score: str, run: RunConfig) -> None:
    """Raise UserError where a run of this task has no such score."""
    task = get_recipe(run.recipe).card.task
    known = LIKELIHOOD | EVALUATED.get(task, {})
    kind_of(score)
    if score not in known:
        raise UserError(f"{run.recipe} ({task}) has no score '{score}'; it has {', '.join(known)}")


class RescoreResult(NamedTuple):
    """The scores by name, None where the model cannot be scored so; `why` says why not."""

    scores: dict[str, float | None]
    why: str | None = None


class Rescorer:
    """Scores the final model of the run in `folder` under the settings of other runs."""

    def __init__(self, folder: Path, trained: RunConfig, names: Sequence[str], split: str) -> None:
        self.folder, self.trained, self.names, self.split = folder, trained, names, split
        self.task = get_recipe(trained.recipe).card.task
        self.device = choose_device(trained.device, ALONE)
        self.model = load(folder)

    def __call__(self, point: RunConfig | None) -> RescoreResult:
        """The scores under the settings of `point`."""
        nothing: dict[str, float | None] = dict.fromkeys(self.names)
        if point is None:
            return RescoreResult(nothing, f"{self.trained.recipe} has no such keyword")
        model = self._model(point).to(self.device)
        length = longest_row(point.data)
        if model.max_length is not None and model.max_length < length != longest_row(self.trained.data):
            return RescoreResult(nothing, f"it was built for {model.max_length} positions, and there are {length}")
        # a batch holds one row at least
        point = point.model_copy(
            update={"batch": point.batch.model_copy(update={"tokens": max(length, point.batch.tokens)})}
        )
        with torch.inference_mode():
            likelihood, work = self._likelihood(model, point), self._work(model, point)
            return RescoreResult(
                {name: (likelihood | work).get(name) for name in self.names} | self._rest(model, point)
            )

    def _model(self, point: RunConfig) -> Model:
        """The trained weights in a model of the point's keywords."""
        keywords = self.model.spec.keywords
        changed = {name: value for name, value in point.model.items() if keywords[name] != value}
        if not changed:
            return self.model
        model = build(self.model.spec.recipe, **{**keywords, **changed})
        read_weights(model, self.folder / "model")
        return model.eval()

    def _likelihood(self, model: Model, point: RunConfig) -> dict[str, float]:
        if not set(self.names) & set(LIKELIHOOD):
            return {}
        objective = TrainingObjective(
            model, smoothing=0.0, autocast=choose_autocast(point.precision, self.device)
        ).eval()

        def scorer(*, goes_on: bool) -> Callable[[Batch], BatchScore]:
            memory = CarriedState(model, goes_on=goes_on)

            def score(batch: Batch) -> BatchScore:
                found = objective(to_device(batch, self.device), memory.before(batch))
                assert isinstance(found, BatchScore)
                memory.after(found)
                return found

            return score

        with ExitStack() as stack:
            found = Validator(scorer, self._held(point, stack), EvaluateConfig(), ALONE)()
        assert found is not None
        return {**found, "accuracy": 100 * found["accuracy"]}

    def _held(self, point: RunConfig, stack: ExitStack) -> HeldOutBatches:
        data = self._data(point, stack)
        held = data.valid if self.split == "valid" else data.test
        if held is None:
            raise UserError(f"split is test, but {self.trained.recipe} learned from data without any (data.test)")
        return held

    def _work(self, model: Model, point: RunConfig) -> dict[str, float | None]:
        """What a model counts of its own work; None where it does the same for all tokens."""
        found: dict[str, float | None] = {}
        if "span" in self.names:
            found["span"] = mean_span(model)
        if "steps" in self.names:
            assert isinstance(model, LanguageModel)
            with ExitStack() as stack:
                found["steps"] = mean_steps(model, self._held(point, stack), self.device)
        return found

    def _data(self, point: RunConfig, stack: ExitStack) -> OpenedData:
        """The point's data; what training prepared is not written over."""
        shared = point.data == self.trained.data or isinstance(point.data, TextData | SyntheticData)
        room = self.folder / "data" if shared else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return open_data(point.data, self.task, batch_tokens=point.batch.tokens, cache=room, seed=point.seed)

    def _rest(self, model: Model, point: RunConfig) -> dict[str, float | None]:
        """The scores that are more than a likelihood."""
        wanted = [name for name in self.names if name not in LIKELIHOOD and name not in COUNTED]
        if not wanted:
            return {}
        material = split_of(point, self.task, self.folder, self.split)
        tokenizers = load_tokenizers(self.folder / "model")
        found, _ = TASKS[self.task](Ask(model, tokenizers, point, material, EvaluationSettings(), lambda share: None))
        values = {score.name.lower().replace(" ", "_"): score.value for score in found}
        return {name: values[name] for name in wanted}
