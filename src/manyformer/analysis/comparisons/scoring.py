"""Scoring of trained models under settings that differ from those of training."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from manyformer.analysis.figures.token_work import mean_span, mean_steps
from manyformer.base.errors import UserError, suggest_names
from manyformer.base.system import temporary_folder
from manyformer.config import EvaluateConfig, RunConfig
from manyformer.conversion import load
from manyformer.data import load_tokenizers, open_data
from manyformer.data.batching.epochs import HeldOutBatches
from manyformer.data.pipeline.kind import kind_of
from manyformer.inference.evaluate.eval_data import TrainedRun, data_form, task_of_run
from manyformer.inference.evaluate.evaluate import score_model
from manyformer.models import BatchScore, Model
from manyformer.models.model import CarriedState
from manyformer.models.model_files import read_weights
from manyformer.models.scores import ScoreKind
from manyformer.models.tasks import TASKS
from manyformer.models.tasks.language_modelling import WORK_SCORES
from manyformer.nn.batches import Batch
from manyformer.recipes import build
from manyformer.recipes.parts.registry import task_of
from manyformer.training.build_model import choose_autocast, choose_device
from manyformer.training.process_group import SINGLE_PROCESS_GROUP
from manyformer.training.validation import Validator

LIKELIHOOD_SCORES = {
    "loss": ScoreKind("nats", lower_is_better=True, digits=3),
    "accuracy": ScoreKind("%"),
    "perplexity": ScoreKind(lower_is_better=True),
    "bits_per_byte": ScoreKind(lower_is_better=True, digits=3),
}
"""Scores computed from the likelihood of the held-out data, for every task."""


def score_kind(score: str) -> ScoreKind:
    """The kind of a score by name. Raises UserError for an unknown score."""
    score_kinds = LIKELIHOOD_SCORES | {name: kind for task in TASKS.values() for name, kind in task.score_kinds.items()}
    if score not in score_kinds:
        raise UserError(f"there is no score '{score}'; {suggest_names(score, score_kinds)}")
    return score_kinds[score]


def check_score(score: str, run: RunConfig) -> None:
    """Raise UserError if the task of `run` has no such score."""
    task = task_of_run(run)
    score_kinds = [*LIKELIHOOD_SCORES, *task.score_kinds]
    # an unknown name gets the nearest of all tasks, before that of this task is asked
    score_kind(score)
    if score not in score_kinds:
        raise UserError(f"{run.recipe} ({task.name}) has no score '{score}'; it has {', '.join(score_kinds)}")


class RescoreResult(NamedTuple):
    """The scores by name, None if the model cannot be scored under these settings, for the given `reason`."""

    scores: dict[str, float | None]
    reason: str | None = None


class Rescorer:
    """Scores the final model of the run in `folder` under the settings of other runs."""

    def __init__(self, folder: Path, trained: RunConfig, names: Sequence[str], split: str) -> None:
        self.folder = folder
        self.trained = trained
        self.names = names
        self.split = split
        self.device = choose_device(trained.device, SINGLE_PROCESS_GROUP)
        self.model = load(folder)

    def __call__(self, point: RunConfig | None) -> RescoreResult:
        """The scores under the settings of `point`."""
        no_scores: dict[str, float | None] = dict.fromkeys(self.names)
        if point is None:
            return RescoreResult(no_scores, f"{self.trained.recipe} has no such keyword")
        model = self._model_for(point).to(self.device)
        length = point.data.row_length
        if model.max_length is not None and model.max_length < length != self.trained.data.row_length:
            return RescoreResult(no_scores, f"it was built for {model.max_length} positions, but there are {length}")
        # a batch must hold at least one row
        batch = point.batch.model_copy(update={"tokens": max(length, point.batch.tokens)})
        point = point.model_copy(update={"batch": batch})
        with torch.inference_mode():
            likelihood = self._likelihood_scores(model, point)
            work = self._work_scores(model, point)
            scores = {name: (likelihood | work).get(name) for name in self.names}
            return RescoreResult(scores | self._task_scores(model, point))

    def _model_for(self, point: RunConfig) -> Model:
        """A model with the keywords of `point` and the trained weights."""
        keywords = self.model.spec.keywords
        changed = {name: value for name, value in point.model.items() if keywords[name] != value}
        if not changed:
            return self.model
        model = build(self.model.spec.recipe, **{**keywords, **changed})
        # keywords of a sweep such as a window change no weight, so that the trained ones fit
        read_weights(model, self.folder / "model")
        return model.eval()

    def _likelihood_scores(self, model: Model, point: RunConfig) -> dict[str, float]:
        if not set(self.names) & set(LIKELIHOOD_SCORES):
            return {}
        autocast = choose_autocast(point.precision, self.device, model)

        def scorer(*, rows_continue: bool) -> Callable[[Batch], BatchScore]:
            return CarriedState(model, rows_continue=rows_continue).score

        with ExitStack() as stack:
            batches = self._held_out(point, stack)
            validator = Validator(scorer, batches, EvaluateConfig(), SINGLE_PROCESS_GROUP, task=task_of(model))
            with torch.autocast(self.device.type, dtype=autocast, enabled=autocast is not None):
                scores = validator()
        assert scores is not None
        # in per cent, as the scores of the other tasks
        return {**scores, "accuracy": 100 * scores["accuracy"]}

    def _held_out(self, point: RunConfig, stack: ExitStack) -> HeldOutBatches:
        # prepared files of the training are never overwritten
        shared = point.data == self.trained.data or kind_of(point.data).cache_is_shared
        if shared:
            cache = self.folder / "data"
        else:
            cache = stack.enter_context(temporary_folder())
        data = open_data(point.data, data_form(point), batch_tokens=point.batch.tokens, cache=cache, seed=point.seed)
        batches = data.valid if self.split == "valid" else data.test
        if batches is None:
            raise UserError(
                f"split is test, but {self.trained.recipe} was trained on data without a test split (data.test)"
            )
        return batches

    def _work_scores(self, model: Model, point: RunConfig) -> dict[str, float | None]:
        """The computation per token that the model counts; None if it is the same for all tokens."""
        scores: dict[str, float | None] = {}
        if "span" in self.names:
            scores["span"] = mean_span(model)
        if "steps" in self.names:
            with ExitStack() as stack:
                scores["steps"] = mean_steps(model, self._held_out(point, stack), self.device)
        return scores

    def _task_scores(self, model: Model, point: RunConfig) -> dict[str, float | None]:
        """The scores computed by `manyformer evaluate` for the task."""
        names = [name for name in self.names if name not in LIKELIHOOD_SCORES and name not in WORK_SCORES]
        if not names:
            return {}
        tokenizers = load_tokenizers(self.folder / "model")
        eval_data = TrainedRun(self.folder, point, tokenizers).load_split(self.split)
        results = score_model(model, point, tokenizers, eval_data).scores
        values = {score.name.lower().replace(" ", "_"): score.value for score in results}
        return {name: values.get(name) for name in names}
