"""The training engine: model and optimizer with steps, scoring, checkpoint files and weight averaging."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyformer.batches import Batch, to_device
from manyformer.config import AdagradConfig, OptimConfig
from manyformer.models import BatchLoss, BatchScore, Model
from manyformer.models.carried_state import CarriedState
from manyformer.train.objective import TrainingObjective
from manyformer.train.optimizers import clip_each_gradient, make_optimizer, set_learning_rate
from manyformer.train.parallel_strategy import ParallelStrategy


class StepResult(NamedTuple):
    """Result of a step: `figures` (mean loss, mean auxiliary loss, gradient norm) on the device, and its counts.

    The figures of all processes must be summed; the counts are totals over all processes.
    """

    figures: Tensor
    targets: int
    tokens: int


class TrainingEngine:
    """Trains the model of an objective, in one process or together with others.

    `rows_continue` says that row r of each batch continues row r of the previous one: a model with a memory then
    carries its state from batch to batch.
    """

    def __init__(
        self,
        objective: TrainingObjective,
        optim: OptimConfig,
        strategy: ParallelStrategy,
        *,
        rows_continue: bool = False,
    ) -> None:
        self.strategy, self.process_group, self.max_grad_norm = strategy, strategy.process_group, optim.max_grad_norm
        self.max_weight_grad_norm = optim.max_weight_grad_norm if isinstance(optim, AdagradConfig) else None
        self.model: Model = objective.model
        self.device = self.model.device
        self._prepared = strategy.prepare(objective)
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = make_optimizer(self.model, optim)
        self.carried_state = CarriedState(self.model, rows_continue=rows_continue)

    def step(self, batches: Sequence[Batch], learning_rate: float) -> StepResult:
        """One optimizer step on the batches of all processes, normalized by the total number of targets."""
        # it visits every module, which takes a twentieth of a step of a tiny model
        if not (self._prepared.training and self.model.training):
            self._prepared.train()
        batches = [self.strategy.local_batch(batch) for batch in batches]
        local_counts = [sum(batch.target_count() for batch in batches), sum(batch.token_count() for batch in batches)]
        targets, tokens = map(int, self.process_group.sum_numbers(local_counts))
        figures = torch.zeros(3, device=self.device)
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            with self.strategy.gradient_sync(self._prepared, last=is_last):
                figures[:2] += self._backward(batch, max(1, targets), len(batches) * self.process_group.size)
        if self.max_weight_grad_norm is not None:
            clip_each_gradient(self.weights, self.max_weight_grad_norm)
        if self.max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.weights, self.max_grad_norm)
            if hasattr(norm, "full_tensor"):
                norm = norm.full_tensor()  # the norm of sharded gradients is a DTensor
            figures[2] = norm / self.process_group.size
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(figures, targets, tokens)

    def scorer(self, *, rows_continue: bool) -> Callable[[Batch], BatchScore]:
        """A function that scores this process's batches of one pass, in order and without dropout."""
        carried_state = CarriedState(self.model, rows_continue=rows_continue)

        def score(batch: Batch) -> BatchScore:
            self._prepared.eval()
            batch = self.strategy.local_batch(batch)
            with torch.no_grad():
                batch_score = self._prepared(to_device(batch, self.device), carried_state.state_for(batch))
            self.strategy.after_scoring(self._prepared)
            assert isinstance(batch_score, BatchScore)
            carried_state.update(batch_score)
            return batch_score

        return score

    def has_finite_weights(self) -> bool:
        """Whether all weights are finite; reveals a non-finite gradient where no clipping computes the norm."""
        local_weights = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in self.weights)
        return not self.process_group.any_process(not all(bool(weight.isfinite().all()) for weight in local_weights))

    def write(self, folder: Path) -> None:
        """Write weights and optimizer state into a new folder."""
        self.strategy.write(self.model, self.optimizer, folder)

    def read(self, folder: Path) -> None:
        """Restore weights and optimizer state from a folder."""
        self.strategy.read(self.model, self.optimizer, folder)

    def read_weights(self, folder: Path) -> None:
        """Restore only the weights of a checkpoint."""
        self.strategy.read(self.model, None, folder)

    def average(self, folders: Sequence[Path]) -> None:
        """Set every weight to its mean over these checkpoints, summed in float32 (Vaswani et al. 2017, section 6.1).

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

    def _backward(self, batch: Batch, targets: int, num_batches: int) -> Tensor:
        loss = self._prepared(to_device(batch, self.device), self.carried_state.state_for(batch))
        assert isinstance(loss, BatchLoss)
        self.carried_state.update(loss)
        mean = total = loss.total.float() / targets
        extra = torch.zeros_like(mean)
        # a plain number has no gradient, and copying it to a GPU would synchronize with the device
        if isinstance(loss.extra, Tensor):
            extra = loss.extra.float() / num_batches
            total = mean + extra
        # gradients are averaged over the processes, and each loss is already divided by the targets of all processes
        (total * self.process_group.size).backward()  # type: ignore[no-untyped-call]
        return torch.stack([mean.detach(), extra.detach()])
