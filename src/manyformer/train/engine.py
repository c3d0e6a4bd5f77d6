"""Model and optimiser as one thing that steps, is written and is read; on one process."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from manyformer.batches import Batch
from manyformer.config import OptimConfig
from manyformer.models import Loss, Model, Score
from manyformer.models.files import read_weights, write_parts
from manyformer.train.objective import Objective, targets_in, to_device
from manyformer.train.optimisers import make_optimiser, named_state, restore_state, set_rate

OPTIMISER = "optimiser.safetensors"


class Stepped(NamedTuple):
    """What a step gave, still on the device: mean loss and auxiliary loss, norm of the gradient; and its targets."""

    figures: Tensor
    targets: int


class Engine:
    """Trains `objective.model`; `call` is the objective as it is called, compiled where that was asked for."""

    def __init__(self, objective: Objective, call: Callable[[Batch], Loss | Score], optim: OptimConfig) -> None:
        self.objective, self.call, self.clip = objective, call, optim.clip
        self.model: Model = objective.model
        self.device = self.model.device
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimiser = make_optimiser(self.model, optim)

    def step(self, batches: Sequence[Batch], rate: float) -> Stepped:
        """One step on the sum of these batches, normalised by all of their targets."""
        self.objective.train()
        targets = self._count(batches)
        figures = torch.zeros(3, device=self.device)
        for number, batch in enumerate(batches):
            figures[:2] += self._backward(batch, targets, len(batches), last=number == len(batches) - 1)
        if self.clip is not None:
            figures[2] = nn.utils.clip_grad_norm_(self.weights, self.clip)
        set_rate(self.optimiser, rate)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return Stepped(figures, targets)

    def score(self, batch: Batch) -> Score:
        """The score of a batch, without dropout."""
        self.objective.eval()
        with torch.no_grad():
            score = self.call(to_device(batch, self.device))
        assert isinstance(score, Score)
        return score

    def finite(self) -> bool:
        """Whether all weights are numbers; a gradient that was none shows here where no clipping looks at it."""
        return all(bool(weight.isfinite().all()) for weight in self.weights)

    def write(self, folder: Path) -> None:
        """Weights and optimiser into a new folder."""
        write_parts(self.model, folder)
        save_file(named_state(self.model, self.optimiser), folder / OPTIMISER)

    def read(self, folder: Path) -> None:
        """Weights and optimiser as they were written."""
        self.read_weights(folder)
        restore_state(self.model, self.optimiser, load_file(folder / OPTIMISER))

    def read_weights(self, folder: Path) -> None:
        """The weights of a checkpoint alone."""
        read_weights(self.model, folder)

    def _count(self, batches: Sequence[Batch]) -> int:
        return max(1, sum(targets_in(batch) for batch in batches))

    def _backward(self, batch: Batch, targets: int, parts: int, *, last: bool) -> Tensor:
        loss = self.call(to_device(batch, self.device))
        assert isinstance(loss, Loss)
        mean, extra = loss.total.float() / targets, torch.as_tensor(loss.extra, device=self.device) / parts
        (mean + extra).backward()  # type: ignore[no-untyped-call]
        return torch.stack([mean.detach(), extra.detach().float()])
