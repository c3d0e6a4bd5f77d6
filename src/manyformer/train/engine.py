"""Model and optimiser as one thing that steps, scores, is written and is read."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyformer.batches import Batch
from manyformer.config import OptimConfig
from manyformer.models import BatchLoss, BatchScore, Model
from manyformer.models.carried_state import CarriedState
from manyformer.train.objective import TrainingObjective, targets_in, to_device, tokens_in
from manyformer.train.optimizers import make_optimiser, set_rate
from manyformer.train.parallel_strategy import ParallelStrategy


class StepResult(NamedTuple):
    """What a step gave: mean loss, mean auxiliary loss and norm of the gradient, still on the device; and its size.

    The figures are our part of what the sum over all processes gives; the counts are those of all.
    """

    figures: Tensor
    targets: int
    tokens: int


class TrainingEngine:
    """Trains the model of an objective, alone or together with other processes.

    `goes_on` says that rows go on from batch to batch: a model with a memory then remembers the batches before.
    """

    def __init__(
        self, objective: TrainingObjective, optim: OptimConfig, sharing: ParallelStrategy, *, goes_on: bool = False
    ) -> None:
        self.sharing, self.world, self.clip = sharing, sharing.world, optim.clip
        self.model: Model = objective.model
        self.device = self.model.device
        self._call = sharing.prepare(objective)
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimiser = make_optimiser(self.model, optim)
        self.memory = CarriedState(self.model, goes_on=goes_on)

    def step(self, batches: Sequence[Batch], rate: float) -> StepResult:
        """One step on the sum of these batches and those of the other processes, normalised by all of their targets."""
        self._call.train()
        ours = [sum(map(targets_in, batches)), sum(map(tokens_in, batches))]
        targets, tokens = map(int, self.world.sums(ours))
        figures = torch.zeros(3, device=self.device)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with self.sharing.one_pass(self._call, last=last):
                figures[:2] += self._backward(batch, max(1, targets), len(batches) * self.world.size)
        if self.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.weights, self.clip)
            figures[2] = self.sharing.norm(norm) / self.world.size
        set_rate(self.optimiser, rate)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return StepResult(figures, targets, tokens)

    def scorer(self, *, goes_on: bool) -> Callable[[Batch], BatchScore]:
        """What scores our parts of the batches of one pass, in their order, without dropout."""
        memory = CarriedState(self.model, goes_on=goes_on)

        def score(batch: Batch) -> BatchScore:
            self._call.eval()
            with torch.no_grad():
                found = self._call(to_device(batch, self.device), memory.before(batch))
            self.sharing.after_scoring(self._call)
            assert isinstance(found, BatchScore)
            memory.after(found)
            return found

        return score

    def finite(self) -> bool:
        """Whether all weights are numbers; a gradient that was none shows here where no clipping looks at it."""
        ours = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in self.weights)
        return not self.world.any(not all(bool(weight.isfinite().all()) for weight in ours))

    def write(self, folder: Path) -> None:
        """Weights and optimiser into a new folder."""
        self.sharing.write(self.model, self.optimiser, folder)

    def read(self, folder: Path) -> None:
        """Weights and optimiser as they were written."""
        self.sharing.read(self.model, self.optimiser, folder)

    def read_weights(self, folder: Path) -> None:
        """The weights of a checkpoint alone."""
        self.sharing.read_weights(self.model, folder)

    def average(self, folders: Sequence[Path]) -> None:
        """Let every weight be its mean over these checkpoints, summed in float32 (Vaswani et al. 2017, section 6.1).

        A tied weight counts once; buffers are those of the last checkpoint.
        """
        weights = [weight.detach() for weight in self.model.parameters()]
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        for folder in folders:
            self.read_weights(folder)
            for total, weight in zip(sums, weights, strict=True):
                total += weight
        for total, weight in zip(sums, weights, strict=True):
            weight.copy_(total / len(folders))

    def _backward(self, batch: Batch, targets: int, parts: int) -> Tensor:
        loss = self._call(to_device(batch, self.device), self.memory.before(batch))
        assert isinstance(loss, BatchLoss)
        self.memory.after(loss)
        mean = whole = loss.total.float() / targets
        extra = torch.zeros_like(mean)
        # a number has no gradient, and bringing it to a GPU would wait for that
        if isinstance(loss.extra, Tensor):
            extra = loss.extra.float() / parts
            whole = mean + extra
        # the gradient is averaged over the processes, and each has divided by the targets of all
        (whole * self.world.size).backward()  # type: ignore[no-untyped-call]
        return torch.stack([mean.detach(), extra.detach()])
