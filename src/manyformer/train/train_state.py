"""The train state of a run: counters and scores that a checkpoint saves besides tensors and generators."""

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from manyformer.config import RunConfig


@dataclass
class MetricsWindow:
    """Sums over the steps since the last row of the metrics."""

    nats: float = 0.0
    extra: float = 0.0
    targets: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0

    @property
    def loss(self) -> float:
        """The mean loss over all targets; 0 if there were none."""
        return self.nats / max(1, self.targets)


class RankedCheckpoint(NamedTuple):
    """A validated checkpoint; a smaller `sort_key` is better."""

    sort_key: float
    step: int
    scores: dict[str, float]


@dataclass
class TrainState:
    """Counters of a run; `seconds` of training are summed over interruptions, `metrics_rows` counts rows of metrics.

    `cpu_seconds` is the CPU time of all threads and processes. `ranking` holds the best validated steps, best first.
    """

    step: int = 0
    tokens: int = 0
    epochs: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    metrics_rows: int = 0
    last_evaluated_step: int = 0
    evaluations_since_best: int = 0
    ranking: list[RankedCheckpoint] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    window: MetricsWindow = field(default_factory=MetricsWindow)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "TrainState":
        window, ranking = MetricsWindow(**content["window"]), [RankedCheckpoint(*entry) for entry in content["ranking"]]
        return cls(**{**content, "window": window, "ranking": ranking})

    def record_scores(self, scores: dict[str, float], sort_key: float, *, keep: int) -> bool:
        """Record this step's scores, keep the `keep` best steps, and return whether this one is the best so far."""
        self.last_evaluated_step, self.scores = self.step, scores
        best = not self.ranking or sort_key < self.ranking[0].sort_key
        self.evaluations_since_best = 0 if best else self.evaluations_since_best + 1
        # at least one entry, to know the best score; a stable sort leaves the earlier of equals in front
        self.ranking = sorted(
            [*self.ranking, RankedCheckpoint(sort_key, self.step, scores)], key=lambda entry: entry.sort_key
        )[: max(1, keep)]
        return best


def run_progress(run: RunConfig, train_state: TrainState) -> float:
    """The completed fraction of the run, 0 to 1, by the limit that is nearest."""
    limits = run.limits
    consumed = (
        (train_state.step, limits.steps),
        (train_state.epochs, limits.epochs),
        (train_state.tokens, limits.tokens),
        (train_state.seconds / 60, limits.minutes),
        (train_state.cpu_seconds / 60, limits.cpu_minutes),
    )
    return min(1.0, max(value / limit for value, limit in consumed if limit is not None))


def end_reason(run: RunConfig, train_state: TrainState) -> str | None:
    """Why the run has ended; None while it has not."""
    limits = run.limits
    if limits.steps is not None and train_state.step >= limits.steps:
        return f"limits.steps {limits.steps} reached"
    if limits.epochs is not None and train_state.epochs >= limits.epochs:
        return f"limits.epochs {limits.epochs:g} reached"
    if limits.tokens is not None and train_state.tokens >= limits.tokens:
        return f"limits.tokens {limits.tokens} reached"
    if limits.minutes is not None and train_state.seconds >= 60 * limits.minutes:
        return f"limits.minutes {limits.minutes:g} reached"
    if limits.cpu_minutes is not None and train_state.cpu_seconds >= 60 * limits.cpu_minutes:
        return f"limits.cpu_minutes {limits.cpu_minutes:g} reached"
    patience = run.evaluate.patience
    if patience is not None and train_state.evaluations_since_best >= patience:
        count = train_state.evaluations_since_best
        return f"{count} evaluations in a row without a better one (evaluate.patience {patience})"
    return None
