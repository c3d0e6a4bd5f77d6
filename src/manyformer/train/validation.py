"""Scoring of the validation data during training."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from manyformer.batches import Batch
from manyformer.config import EvaluateConfig
from manyformer.data.epochs import HeldOutBatches
from manyformer.models import BatchScore
from manyformer.scores import is_comparable, rank_key
from manyformer.tasks import ScoreSums, Task
from manyformer.train.ahead_feed import PassReader
from manyformer.train.process_group import ProcessGroup

ScorerFactory = Callable[..., Callable[[Batch], BatchScore]]
"""Begins a pass over batches, given `rows_continue`, and returns a function that scores them in order."""


@contextmanager
def plain_pass(batches: Iterable[Batch]) -> Iterator[Iterator[Batch]]:
    """A pass over batches that are read when their turn comes."""
    yield iter(batches)


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
        with self._read(self._select_batches()) as batches:
            for batch in batches:
                if stop():
                    return None
                sums = sums.plus(score(batch))
        names = sorted(sums.others)
        local_sums = [sums.nats, sums.targets, sums.correct, *(sums.others[name] for name in names)]
        nats, targets, correct, *others = self._process_group.sum_numbers(local_sums)
        total = ScoreSums(nats, int(targets), int(correct), defaultdict(float, zip(names, others)))
        return self._task.validation(total, self._units)

    def _select_batches(self) -> Iterator[Batch]:
        """The configured number of batches, spread evenly because held-out sequences are sorted by length.

        Batches whose rows continue are taken from the first one on.
        """
        available = len(self._batches)
        count = min(available, self._config.batches or available)
        if self._batches.rows_continue:
            return itertools.islice(self._batches, count)
        indices = {index * available // count for index in range(count)}
        return (batch for index, batch in enumerate(self._batches) if index in indices)

    def score_names(self) -> list[str]:
        """The names of the scores, in the order of the task."""
        return list(self._task.validation(ScoreSums(targets=1), self._units))

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
