"""What decides which heads are removed first: the gradients of their gates, or gates that are trained."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

from manyformer.attention.head_gates import read_gates
from manyformer.batches import Batch
from manyformer.config import RunConfig
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import TrainedRun
from manyformer.heads.head_importance import HeadValues, head_importance, normalize_layers
from manyformer.models import Model
from manyformer.rollouts import EpisodeBatch
from manyformer.train import train
from manyformer.train.events import EventListener
from manyformer.train.run_folder import RESULT_FILE
from manyformer.train.validation import ResultRecord

TRAINING_SHARE = 5
"""Gates are trained for the number of the run's steps divided by this, unless steps are given."""

ImportanceFn = Callable[[Model, Sequence[Batch], bool], HeadValues]
"""The importance of each head, from validation batches and whether their rows continue; some heads may be off."""


class RankedWeights(NamedTuple):
    """The folder of the run whose weights are pruned, and the importance of its heads."""

    folder: Path
    importance: ImportanceFn


class HeadRanking(ABC):
    """Decides the order in which heads are removed; `name` is its name on the command line."""

    name: str

    @abstractmethod
    def rank(self, trained: TrainedRun, part: str | None, out: Path) -> RankedWeights:
        """Rank the heads of the layers in `part`; a run that is trained for it is in the folder `name` of `out`."""


@final
@dataclass(frozen=True)
class ImportanceRanking(HeadRanking):
    """By the mean absolute gradient of each head's gate, computed again after each step (Michel et al. 2019, 4.1)."""

    name = "importance"

    def rank(self, trained: TrainedRun, part: str | None, out: Path) -> RankedWeights:
        return RankedWeights(trained.folder, _gradient_importance)


def _gradient_importance(model: Model, batches: Sequence[Batch], rows_continue: bool) -> HeadValues:  # noqa: FBT001
    if any(isinstance(batch, EpisodeBatch) for batch in batches):
        raise UserError("a policy has no loss on held-out data, whose gradient is the importance: choose --how gates")
    return normalize_layers(head_importance(model, batches, rows_continue=rows_continue))


@final
@dataclass(frozen=True)
class GateRanking(HeadRanking):
    """By gates that are trained together with the weights (Voita et al. 2019, section 6); see `gate_training`."""

    penalty: float
    learning_rate: float
    steps: int | None
    on_event: EventListener | None
    name = "gates"

    def rank(self, trained: TrainedRun, part: str | None, out: Path) -> RankedWeights:
        folder = out / self.name
        train(gate_training(trained, self, part, folder), on_event=self.on_event)
        log_alpha = read_gates(folder)
        return RankedWeights(folder, lambda *_: log_alpha)


def gate_training(trained: TrainedRun, ranking: GateRanking, part: str | None, out: Path) -> RunConfig:
    """The run that trains gates: that of the model, from its weights, for fewer steps and at a lower learning rate.

    It makes a fifth of the steps, unless `ranking` has another number. With a `part` such as "encoder", all other
    parts are frozen, as in the paper."""
    steps = ranking.steps
    settings = trained.config.model_dump(mode="json", by_alias=True)
    if steps is None and not (trained.folder / RESULT_FILE).exists():
        raise UserError(f"{trained.folder} has not been trained itself, so the number of steps for gates must be given")
    if steps is None:
        steps = max(1, ResultRecord.read(trained.folder / RESULT_FILE).step // TRAINING_SHARE)
    if part is None:
        frozen = []
    else:
        frozen = _other_parts(trained.load_model("cpu"), part)
    settings.update(
        init_from=str(trained.folder),
        out=str(out),
        frozen=frozen,
        schedule={"name": "cosine", "warmup": steps // 10},
        limits={"steps": steps},
    )
    settings["optim"]["lr"] = ranking.learning_rate
    settings["loss"] |= {"gate_penalty": ranking.penalty, "gated_part": part}
    settings["evaluate"] |= {"patience": None}
    settings["save"] |= {"keep_best": 0, "average_last": 0}
    return RunConfig.model_validate(settings)


def _other_parts(model: Model, part: str) -> list[str]:
    """The top-level modules with weights that do not belong to `part`, which its embedding does."""
    prefix = part.partition(".")[0]
    return [
        name
        for name, child in model.named_children()
        if not name.startswith(prefix) and next(child.parameters(), None) is not None
    ]
