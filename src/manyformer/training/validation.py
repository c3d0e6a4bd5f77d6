"""Scoring of the validation data during training, and the final model that scores choose, with its record and card."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from manyformer.base.files.json_records import Count, FileRecord
from manyformer.base.files.text_tables import printable_line
from manyformer.config import EvaluateConfig, RunConfig
from manyformer.data.batching.epochs import HeldOutBatches
from manyformer.models import BatchScore, Model
from manyformer.models.scores import is_comparable, rank_key
from manyformer.models.tasks import ScoreSums, Task
from manyformer.nn.batches import Batch
from manyformer.recipes import RecipeCard
from manyformer.recipes.parts.own_modules import OwnModule
from manyformer.training.ahead_feed import PassReader
from manyformer.training.engine import TrainingEngine
from manyformer.training.events import TrainResult
from manyformer.training.process_group import ProcessGroup

ScorerFactory = Callable[..., Callable[[Batch], BatchScore]]
"""Begins a pass over batches, given `rows_continue`, and returns a function that scores them in order."""


@contextmanager
def plain_pass(batches: Iterable[Batch]) -> Iterator[Iterator[Batch]]:
    """A pass over batches that are read when their turn comes."""
    yield iter(batches)


def validation_batches(batches: HeldOutBatches, config: EvaluateConfig) -> Iterator[Batch]:
    """The configured number of held-out batches, spread evenly because held-out sequences are sorted by length.

    Batches whose rows continue are taken from the first one on.
    """
    available = len(batches)
    count = min(available, config.batches or available)
    if batches.rows_continue:
        return itertools.islice(batches, count)
    # the first, and then every so many
    indices = {index * available // count for index in range(count)}
    return (batch for index, batch in enumerate(batches) if index in indices)


class Validator:
    """Scores the model on validation data: loss in nats per target, accuracy, perplexity, bits per byte of text.

    `batches` are those of this process, whose sums are added to those of the others; `read` begins a pass over them."""

    def __init__(
        self,
        scorer: ScorerFactory,
        batches: HeldOutBatches,
        config: EvaluateConfig,
        process_group: ProcessGroup,
        *,
        task: Task,
        read: PassReader = plain_pass,
    ) -> None:
        self._read = read
        self._scorer = scorer
        self._config = config
        self._process_group = process_group
        self._batches = batches
        self._task = task
        self._units = batches.units

    def __call__(self, stop: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """The scores of the current weights; None if `stop` ended the pass early."""
        sums = ScoreSums()
        score = self._scorer(rows_continue=self._batches.rows_continue)
        with self._read(validation_batches(self._batches, self._config)) as batches:
            for batch in batches:
                if stop():
                    return None
                sums = sums.plus(score(batch))
        # all processes add up the same scores in the same order
        names = sorted(sums.others)
        local_sums = [sums.nats, sums.targets, sums.correct, *(sums.others[name] for name in names)]
        nats, targets, correct, *other_sums = self._process_group.sum_numbers(local_sums)
        total = ScoreSums(nats, int(targets), int(correct), defaultdict(float, zip(names, other_sums)))
        return self._task.validation(total, self._units)

    @property
    def has_data(self) -> bool:
        """Whether there is anything to score."""
        return len(self._batches) > 0

    def score_names(self) -> list[str]:
        """The names of the scores, in the order of the task."""
        return list(self._task.validation(ScoreSums(targets=1), self._units))

    @property
    def bounds(self) -> frozenset[str]:
        """The names of the scores that are bounds."""
        return self._task.bounds

    @property
    def metric(self) -> str:
        """The name of the metric that ranks checkpoints."""
        return self._config.metric

    def reaches_target(self, scores: dict[str, float]) -> bool:
        """Whether the ranking metric is as good as `evaluate.target`."""
        target = self._config.target
        if target is None or not is_comparable(scores[self.metric]):
            return False
        return self.sort_key(scores) <= self.sort_key({self.metric: target})

    def sort_key(self, scores: dict[str, float]) -> float:
        """The ranking metric with the sign that makes smaller better; infinity for one that is not finite."""
        metric = self._config.metric
        return rank_key(scores[metric], lower_is_better=self._task.metrics[metric])


class ResultRecord(FileRecord):
    """The content of result.json: how a run ended, and the settings that chose its final weights."""

    title = "the result of a run"
    format_number = 2
    step: Count
    reason: str
    chosen_weights: str
    scores: dict[str, float]
    save: dict[str, Any]

    @classmethod
    def of(cls, result: TrainResult, run: RunConfig) -> Self:
        """The record of a result of this run."""
        return cls(
            step=result.step,
            reason=result.reason,
            chosen_weights=result.chosen_weights,
            scores=result.scores,
            save=run.save.model_dump(mode="json"),
        )

    def result(self, out: Path, bounds: frozenset[str]) -> TrainResult:
        """The result of the run in the folder `out`, whose task has these `bounds`."""
        return TrainResult(out, self.step, self.reason, self.chosen_weights, self.scores, bounds)


class WeightChoice(NamedTuple):
    """A candidate for the final weights: its checkpoint, description and scores on the validation data."""

    checkpoint: Path
    description: str
    scores: dict[str, float]


class AverageChoice(NamedTuple):
    """An average of weights that the final model has if it scores better: its description, and how it is loaded."""

    description: str
    load: Callable[[], None]


def choose_weights(
    engine: TrainingEngine, single: WeightChoice, average: AverageChoice | None, validator: Validator
) -> WeightChoice:
    """Load the weights of `single` into the model, or an average if that scores better."""
    if average is not None:
        average.load()
        scores = validator()
        assert scores is not None
        description = average.description
        if validator.sort_key(scores) < validator.sort_key(single.scores):
            return single._replace(description=f"{description}, better than {single.description}", scores=scores)
        comparison = f"{description} is not better ({validator.metric} {scores[validator.metric]:.4f})"
        single = single._replace(description=f"{single.description}; {comparison}")
    # the model holds the average, or the weights of the last step
    engine.read_weights(single.checkpoint, averaged=engine.scores_average)
    return single


def model_card(run: RunConfig, card: RecipeCard, model: Model, data: Sequence[str], result: TrainResult) -> str:
    """Format the model card as Markdown; `data` are lines that describe the data."""
    parameters = sum(weight.numel() for weight in model.parameters())
    table = "\n".join(
        f"| {name.replace('_', ' ')} | {'at most ' if name in result.bounds else ''}{value:.4f} |"
        for name, value in result.scores.items()
    )
    data_lines = "\n".join(printable_line(f"- {line}") for line in data)
    origin = f"from the recipe `{card.name}`"
    loading = '`manyformer.load("this folder")`'
    if isinstance(model, OwnModule):
        origin = f"of `{card.name}`, a module that only its own program builds"
        loading = '`safetensors.torch.load_model(module, "model.safetensors")`'
    return f"""# {card.title}

{card.paper}. {card.summary}

Made by manyformer {origin}, {parameters:,} parameters. Load it with
{loading}.

## Data

{data_lines}

## Scores on the validation data

After {result.step} steps; the weights are {result.chosen_weights}. The loss is in nats per target.

| score | value |
| --- | --- |
{table}

## Model settings

{model.spec.settings_list()}

## Training settings

Optimizer {run.optim.name}, schedule {run.schedule.name}, {run.batch.tokens * run.batch.accumulate:,} tokens a step,
label smoothing {run.loss.label_smoothing:g}, seed {run.seed}. All of them are in `run.yaml` of the run.
"""
