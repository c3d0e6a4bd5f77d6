"""The likelihood of held-out batches under a model, summed batch by batch."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from manyformer.batches import IGNORE_INDEX, to_device
from manyformer.models import BatchScore
from manyformer.models.model import CarriedState
from manyformer.scores import ScoreRecord, perplexity, row_exact_match, token_accuracy
from manyformer.tasks.requests import EvaluationRequest

LIKELIHOOD_SHARE = 0.1
"""The share of the progress of an evaluation that the likelihood takes where texts are written afterwards."""


@dataclass(frozen=True)
class ScoreSums:
    """Sums over all targets: nats, the number of targets, and how many were top-1.

    `others` are the sums of `BatchScore.others`, 0 for a name without any.
    """

    nats: float = 0.0
    targets: int = 0
    correct: int = 0
    others: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def plus(self, score: BatchScore) -> "ScoreSums":
        """The sums with those of another batch."""
        others = self.others.copy()
        for name, value in score.others.items():
            others[name] += float(value)
        return ScoreSums(
            self.nats + float(score.nll), self.targets + int(score.targets), self.correct + int(score.correct), others
        )


def likelihood(request: EvaluationRequest[Any], *, final_progress: float = 1.0) -> ScoreSums:
    """The sums over all batches, with a carried state where the model has one and the rows continue."""
    assert request.batches is not None
    sums = ScoreSums()
    carried = CarriedState(request.model, rows_continue=request.batches.rows_continue)
    for number, batch in enumerate(request.batches, 1):
        # sums, not means of batches, which differ in their number of targets
        sums = sums.plus(carried.score(batch))
        request.on_progress(final_progress * number / len(request.batches))
    return sums


def token_scores(sums: ScoreSums) -> list[ScoreRecord]:
    """Perplexity and accuracy of the targets."""
    return [perplexity(sums.nats, sums.targets), token_accuracy(sums.correct, sums.targets)]


def row_accuracy(request: EvaluationRequest[Any]) -> ScoreRecord:
    """The percentage of rows all of whose targets are predicted, among the rows with a target."""
    assert request.batches is not None
    model = request.model
    matches = 0
    rows = 0
    for batch in request.batches:
        tokens, targets, segments, *_ = to_device(batch, model.device)
        predicted = model(tokens, segments).logits.argmax(-1)
        # a target that is not scored cannot be wrong
        is_scored = targets != IGNORE_INDEX
        has_target = is_scored.any(1)
        matches += int((((predicted == targets) | ~is_scored).all(1) & has_target).sum())
        rows += int(has_target.sum())
    return row_exact_match(matches, rows)
