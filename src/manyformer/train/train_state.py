"""Where a run stands: everything besides tensors and generators that a checkpoint must keep to go on exactly."""

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from manyformer.config import RunConfig


@dataclass
class MetricsWindow:
    """What has happened since the last row of the metrics."""

    nats: float = 0.0
    extra: float = 0.0
    targets: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0

    @property
    def loss(self) -> float:
        """The mean over all targets; 0 where there was none."""
        return self.nats / max(1, self.targets)


class RankedCheckpoint(NamedTuple):
    """A checkpoint by its validation; a smaller `badness` is better."""

    badness: float
    step: int
    scores: dict[str, float]


@dataclass
class TrainState:
    """Counters of a run; `seconds` are those of training, added up over interruptions, `rows` those of the metrics.

    `processor` are the seconds that processors worked, of all threads and processes together.

    `stale` counts the evaluations since the best one, `evaluated` is the step of the last one, `ranking` holds the
    best steps, best first.
    """

    step: int = 0
    tokens: int = 0
    epochs: float = 0.0
    seconds: float = 0.0
    processor: float = 0.0
    rows: int = 0
    evaluated: int = 0
    stale: int = 0
    ranking: list[RankedCheckpoint] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    window: MetricsWindow = field(default_factory=MetricsWindow)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> "TrainState":
        window, ranking = MetricsWindow(**given["window"]), [RankedCheckpoint(*entry) for entry in given["ranking"]]
        return cls(**{**given, "window": window, "ranking": ranking})

    def rank(self, scores: dict[str, float], badness: float, *, keep: int) -> bool:
        """Enter this step's scores; whether it is the best so far. `keep` of the best steps are remembered."""
        self.evaluated, self.scores = self.step, scores
        best = not self.ranking or badness < self.ranking[0].badness
        self.stale = 0 if best else self.stale + 1
        # at least one is remembered, to tell which is best; a stable sort leaves the earlier of equals in front
        self.ranking = sorted(
            [*self.ranking, RankedCheckpoint(badness, self.step, scores)], key=lambda one: one.badness
        )[: max(1, keep)]
        return best


def share(run: RunConfig, standing: TrainState) -> float:
    """How much of the run lies behind, 0 to 1, by the limit that is nearest."""
    limits = run.limits
    done = (
        (standing.step, limits.steps),
        (standing.epochs, limits.epochs),
        (standing.tokens, limits.tokens),
        (standing.seconds / 60, limits.minutes),
        (standing.processor / 60, limits.processor),
    )
    return min(1.0, max(value / limit for value, limit in done if limit is not None))


def ended(run: RunConfig, standing: TrainState) -> str | None:
    """Why the run is over; None while it is not."""
    limits = run.limits
    if limits.steps is not None and standing.step >= limits.steps:
        return f"limits.steps {limits.steps} reached"
    if limits.epochs is not None and standing.epochs >= limits.epochs:
        return f"limits.epochs {limits.epochs:g} reached"
    if limits.tokens is not None and standing.tokens >= limits.tokens:
        return f"limits.tokens {limits.tokens} reached"
    if limits.minutes is not None and standing.seconds >= 60 * limits.minutes:
        return f"limits.minutes {limits.minutes:g} reached"
    if limits.processor is not None and standing.processor >= 60 * limits.processor:
        return f"limits.processor {limits.processor:g} reached"
    patience = run.evaluate.patience
    if patience is not None and standing.stale >= patience:
        return f"{standing.stale} evaluations in a row without a better one (evaluate.patience {patience})"
    return None
