"""Sums of the scores of batches."""

from collections import defaultdict
from dataclasses import dataclass, field

from manyformer.models import BatchScore


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
