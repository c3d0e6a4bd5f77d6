"""The training engine: model and optimizer with steps, scoring, checkpoint files and weight averaging.

Its parts follow it: the scale of the loss in float16, in which small gradients would become 0, and the watch for
weights that no longer move."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from manyformer.base.files.json_records import Count
from manyformer.config import AdagradConfig, EmaConfig, OptimConfig
from manyformer.models import BatchLoss, BatchScore, Model
from manyformer.models.model import CarriedState
from manyformer.models.model_files import find_non_finite, local_tensor
from manyformer.nn.batches import Batch, to_device
from manyformer.nn.runtime.devices import device_kind
from manyformer.nn.runtime.torch_internals import overflow_of, tensor_norms
from manyformer.nn.runtime.training_hooks import AddsPenalty
from manyformer.training.ahead_feed import PreparedBatch
from manyformer.training.optimizers import (
    LR_SCALE,
    clip_each_gradient,
    clip_gradient_values,
    make_optimizer,
    named_optimizer_state,
)
from manyformer.training.process_group import ParallelStrategy
from manyformer.training.weight_average import WeightAverage

LARGEST_SQUARED_NORM = math.sqrt(torch.finfo(torch.float32).max)
"""The largest norm of a gradient whose square is a float32: all optimizers here keep sums of squared gradients."""

MIN_STEPS_WATCHED = 10
"""The fewest steps after which weights that have not changed are worth a word."""

MAX_OVERFLOWS_IN_ROW = 25
"""Steps with an overflow one after another that end a run: the scale is then below 0.002, and not the cause."""


class GradientNorms(NamedTuple):
    """The norm of the gradient of each weight that has one; on the device until somebody needs them."""

    weights: Sequence[nn.Parameter]
    norms: Tensor

    @classmethod
    def of(cls, weights: Sequence[nn.Parameter]) -> "GradientNorms | None":
        """The norms of the gradients of `weights`; None if none of them has a gradient."""
        graded = [weight for weight in weights if weight.grad is not None]
        gradients = [weight.grad for weight in graded if weight.grad is not None]
        if not graded:
            return None
        # (weights,): one tensor, so that one read serves all of them
        return cls(graded, torch.stack(tensor_norms(gradients)))

    @property
    def total(self) -> Tensor:
        """The norm of all gradients together, of all shards where gradients are sharded."""
        return full_tensor(torch.linalg.vector_norm(self.norms))

    def first_above(self, limit: float, names: dict[nn.Parameter, str]) -> str | None:
        """The name of the first weight whose gradient has no norm up to `limit`; reads from the device."""
        for weight, norm in zip(self.weights, full_tensor(self.norms).tolist(), strict=True):
            if not norm <= limit:
                return names[weight]
        return None


def full_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, or the whole of which a process holds a shard."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    full: Tensor = tensor.full_tensor()
    return full


class StepResult(NamedTuple):
    """Result of a step: `figures` (mean loss, mean auxiliary loss, gradient norm, overflow) on the device, and counts.

    The figures of all processes must be summed; the counts are totals over all processes. An overflow above 0 says that
    the step has changed nothing but the scale of the loss.
    """

    figures: Tensor
    targets: int
    tokens: int
    gradient_norms: GradientNorms | None = None
    largest_norm: float = math.inf
    """The largest norm of the gradient that the optimizer can use."""
    skipped: bool = False
    """Whether the step has changed nothing, because its gradient was not finite (`optim.nonfinite`)."""


class TrainingEngine:
    """Trains a model, in one process or together with others: the only training step of the package.

    `autocast` is the dtype of forward passes, None for that of the weights. `rows_continue` says that row r of each
    batch continues row r of the previous one: a model with a memory then carries its state from batch to batch.
    """

    def __init__(
        self,
        model: Model,
        optim: OptimConfig,
        strategy: ParallelStrategy,
        *,
        label_smoothing: float = 0.0,
        autocast: torch.dtype | None = None,
        rows_continue: bool = False,
        ema: EmaConfig | None = None,
        rate_scales: Mapping[str, float] | None = None,
    ) -> None:
        self.model = model
        self._label_smoothing = label_smoothing
        self._autocast = autocast
        self.strategy = strategy
        self.process_group = strategy.process_group
        self.max_grad_norm = optim.max_grad_norm
        self.max_grad_value = optim.max_grad_value
        if isinstance(optim, AdagradConfig):
            self.max_weight_grad_norm = optim.max_weight_grad_norm
        else:
            self.max_weight_grad_norm = None
        # a gradient that is clipped need only be finite: its square is taken afterwards
        limits = (self.max_grad_norm, self.max_weight_grad_norm, self.max_grad_value)
        if any(limit is not None for limit in limits):
            self._largest_norm = torch.finfo(torch.float32).max
        else:
            self._largest_norm = LARGEST_SQUARED_NORM
        self._nonfinite = optim.nonfinite
        self.device = model.device
        self._is_host = device_kind(self.device).is_host
        self._penalized = [module for module in model.modules() if isinstance(module, AddsPenalty)]
        # before the optimizer, which must hold the weights of the sharded model
        self._prepared = strategy.prepare(model)
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = make_optimizer(self.model, optim, rate_scales)
        self.average = None
        if ema is not None and ema.beta is not None:
            self.average = WeightAverage(self.model, ema)
        self.carried_state = CarriedState(self.model, rows_continue=rows_continue)
        self.loss_scaler = LossScaler(self.device) if autocast is torch.float16 else None

    def prepare(self, batch: Batch) -> PreparedBatch:
        """This process's part of a batch with its counts; a pure function of the batch, for any thread."""
        local = self.strategy.local_batch(batch)
        return PreparedBatch(local, local.target_count(), local.token_count())

    def step(self, batches: Sequence[Batch], learning_rate: float) -> StepResult:
        """One optimizer step on the batches of all processes, normalized by the total number of targets."""
        # it visits every module, which takes a twentieth of a step of a tiny model
        if not (self._prepared.training and self.model.training):
            self._prepared.train()
        prepared = [batch if isinstance(batch, PreparedBatch) else self.prepare(batch) for batch in batches]
        local_targets = 0
        local_tokens = 0
        for batch in prepared:
            local_targets += batch.targets
            local_tokens += batch.tokens
        targets, tokens = map(int, self.process_group.sum_numbers([local_targets, local_tokens]))
        # numbers stay on the device: whoever reads them waits for all that it computes
        figures = torch.zeros(4, device=self.device)
        for number, batch in enumerate(prepared, start=1):
            with self.strategy.gradient_sync(self._prepared, last=number == len(prepared)):
                figures[:2] += self._backward(batch, max(1, targets), len(prepared) * self.process_group.size)
        # before any look at the gradients: norms, limits and clipping are those of the loss itself
        overflow = None
        if self.loss_scaler is not None:
            overflow = self.loss_scaler.unscale(self.optimizer)
        gradient_norms = GradientNorms.of(self.weights)
        norm = None
        if gradient_norms is not None:
            norm = gradient_norms.total
            # all processes have the same norm, and the figures are summed over them
            figures[2] = norm / self.process_group.size
        if overflow is not None:
            figures[3] = overflow
        usable = norm is None or self._is_usable(norm)
        if usable:
            self._update_weights(norm, learning_rate)
        elif self._nonfinite == "skip" or self.loss_scaler is not None:
            # what a memory holds after such numbers is not finite either
            self.carried_state.state = None
        if overflow is not None and self.loss_scaler is not None:
            self.loss_scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        skipped = not usable and self._nonfinite == "skip"
        return StepResult(figures, targets, tokens, gradient_norms, self._largest_norm, skipped)

    def _is_usable(self, norm: Tensor) -> bool:
        """Whether the optimizer can use a gradient of this norm.

        On a GPU the loop finds out when it reads the figures of several steps, unless such steps are to be skipped:
        reading a number of each step would wait for the device. The scaler of the loss skips a step without being read,
        but a memory that would go on from it must be forgotten."""
        has_memory_to_lose = self.loss_scaler is not None and self.carried_state.enabled
        if self._nonfinite == "stop" and not has_memory_to_lose and not self._is_host:
            return True
        usable = bool(norm <= self._largest_norm)
        return not self.process_group.any_process(not usable)

    def _update_weights(self, norm: Tensor | None, learning_rate: float) -> None:
        """Clip the gradients, whose norm is given, and make the step of the optimizer."""
        if self.max_grad_value is not None:
            clip_gradient_values(self.weights, self.max_grad_value)
        if self.max_weight_grad_norm is not None:
            clip_each_gradient(self.weights, self.max_weight_grad_norm)
        if self.max_grad_value is not None or self.max_weight_grad_norm is not None:
            clipped_norms = GradientNorms.of(self.weights)
            norm = None
            if clipped_norms is not None:
                norm = clipped_norms.total
        if self.max_grad_norm is not None and norm is not None:
            nn.utils.clip_grads_with_norm_(self.weights, self.max_grad_norm, norm)
        set_learning_rate(self.optimizer, learning_rate)
        if self.loss_scaler is None or norm is None:
            self.optimizer.step()
        else:
            self.loss_scaler.step(self.optimizer)

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=self._autocast, enabled=self._autocast is not None)

    def scorer(self, *, rows_continue: bool) -> Callable[[Batch], BatchScore]:
        """A function that scores this process's batches of one pass, in order and without dropout."""
        carried_state = CarriedState(self.model, rows_continue=rows_continue)

        def score(batch: Batch) -> BatchScore:
            # a step before may have left the model in training mode
            self._prepared.eval()
            if isinstance(batch, PreparedBatch):
                batch = batch.on_device(self.device)
            else:
                batch = to_device(self.strategy.local_batch(batch), self.device)
            state = carried_state.state_for(batch)
            with torch.no_grad(), self._precision():
                batch_score = self._prepared(batch, state)
            self.strategy.after_scoring(self._prepared)
            assert isinstance(batch_score, BatchScore)
            carried_state.update(batch_score)
            return batch_score

        return score

    def non_finite_tensors(self) -> list[str]:
        """The names of the weights and of the tensors of the optimizer that are not finite in this process.

        An infinite mean of squared gradients makes every later step 0: weights that look sound never move again."""
        weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        return [*find_non_finite(weights), *find_non_finite(named_optimizer_state(self.model, self.optimizer))]

    def name_of_gradient(self, result: StepResult) -> str | None:
        """The name of the first weight whose gradient was not finite, or too large, in a step."""
        if result.gradient_norms is None:
            return None
        names = {weight: name for name, weight in self.model.named_parameters()}
        return result.gradient_norms.first_above(result.largest_norm, names)

    def write(self, folder: Path) -> None:
        """Write weights and optimizer state into a new folder."""
        self.strategy.write(self.model, self.optimizer, folder, self.average)

    def read(self, folder: Path, *, has_average: bool = True) -> None:
        """Restore weights, optimizer state and average from a folder; without an average there, it begins anew."""
        self.strategy.read(self.model, self.optimizer, folder, self.average if has_average else None)
        if self.average is not None and not has_average:
            self.average.begin()

    def read_weights(self, folder: Path, *, averaged: bool = False) -> None:
        """Restore only the weights of a checkpoint, or their moving averages."""
        if not averaged:
            self.strategy.read(self.model, None, folder)
            return
        assert self.average is not None
        self.strategy.read(self.model, None, folder, self.average)
        self.average.copy_to_weights()

    @property
    def scores_average(self) -> bool:
        """Whether validations score the moving averages of the weights, which the final model then has."""
        return self.average is not None and self.average.scores_average

    def scored_weights(self) -> AbstractContextManager[None]:
        """Within it the model has the weights that validations score."""
        if self.average is not None and self.average.scores_average:
            return self.average.in_place()
        return nullcontext()

    def average_checkpoints(self, folders: Sequence[Path]) -> None:
        """Set every weight to its mean over these checkpoints, summed in float32 (Vaswani et al. 2017, section 6.1).

        A tied weight counts once; buffers are those of the last checkpoint.
        """
        weights = [weight.detach() for weight in self.model.parameters()]
        # `parameters` names a tied weight once
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        for folder in folders:
            self.read_weights(folder)
            for total, weight in zip(sums, weights, strict=True):
                total += weight
        for total, weight in zip(sums, weights, strict=True):
            weight.copy_(total / len(folders))

    def _backward(self, prepared: PreparedBatch, targets: int, num_batches: int) -> Tensor:
        # nothing is copied from the host to itself
        batch = prepared.batch if self._is_host else prepared.on_device(self.device)
        precision = self._precision()
        state = self.carried_state.state_for(batch)
        with precision:
            loss = self._prepared(batch, state, label_smoothing=self._label_smoothing)
            assert isinstance(loss, BatchLoss)
            self.carried_state.update(loss)
            extra_loss = sum((module.penalty() for module in self._penalized), loss.extra)
        mean = total = loss.total.float() / targets
        extra = torch.zeros_like(mean)
        # a plain number has no gradient, and copying it to a GPU would synchronize with the device
        if isinstance(extra_loss, Tensor):
            extra = extra_loss.float() / num_batches
            total = mean + extra
        # gradients are averaged over the processes, and each loss is already divided by the targets of all processes
        total = total * self.process_group.size
        if self.loss_scaler is not None:
            total = self.loss_scaler.scale(total)
        total.backward()  # type: ignore[no-untyped-call]
        return torch.stack([mean.detach(), extra.detach()])


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group[LR_SCALE]


class LossScale(NamedTuple):
    """The state of a `LossScaler`: the scale, and the steps without an overflow since it last changed."""

    scale: float
    steps_since_change: Count


@final
class LossScaler:
    """torch's GradScaler for one optimizer: an overflow skips the step and halves the scale; 2,000 steps without one
    double it.

    Gradients are the same in all processes, or sharded among them and looked at together, so that all of them skip the
    same steps and have the same scale."""

    def __init__(self, device: torch.device) -> None:
        self._scaler = torch.amp.GradScaler(device.type)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Divide the gradients by the scale; returns a number above 0 if one is not finite, None if there is none."""
        # torch's scaler refuses an optimizer none of whose weights has a gradient
        if all(weight.grad is None for group in optimizer.param_groups for weight in group["params"]):
            return None
        self._scaler.unscale_(optimizer)
        return overflow_of(self._scaler, optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the step of the optimizer, unless the gradients have overflowed."""
        self._scaler.step(optimizer)

    def update(self) -> None:
        """Change the scale after a step whose gradients were unscaled, made or not."""
        self._scaler.update()

    @property
    def state(self) -> LossScale:
        """The scale and what decides its next change; reads from the device."""
        content = self._scaler.state_dict()
        return LossScale(content["scale"], content["_growth_tracker"])

    @state.setter
    def state(self, state: LossScale) -> None:
        content = self._scaler.state_dict()
        self._scaler.load_state_dict({**content, "scale": state.scale, "_growth_tracker": state.steps_since_change})


class MovementWatch:
    """Watches whether steps change any weight at all, by an exact sum of the bits of each weight."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = weights
        self._sums: Tensor | None = None
        self._steps = 0
        self._largest_rate = 0.0

    def begin(self) -> None:
        """Remember the weights as they are now."""
        self._sums = _bit_sums(self._weights)
        self._steps = 0
        self._largest_rate = 0.0

    def count_step(self, learning_rate: float) -> None:
        """Count a step of the optimizer with this learning rate."""
        self._steps += 1
        self._largest_rate = max(self._largest_rate, learning_rate)

    def describe_standstill(self, *, run_ends: bool) -> str | None:
        """A sentence if no weight of this process has changed since `begin`, which then begins anew.

        A few steps are watched further, unless the run ends with them."""
        if not self._weights or self._sums is None or self._steps < (1 if run_ends else MIN_STEPS_WATCHED):
            return None
        steps = self._steps
        largest_rate = self._largest_rate
        # those of the last `begin`, which the next line replaces
        sums = self._sums
        self.begin()
        assert self._sums is not None
        if largest_rate == 0 or not torch.equal(sums, self._sums):
            return None
        return (
            f"no weight has changed in the last {steps:,} steps, although the learning rate was up to "
            f"{largest_rate:.3g}: look at optim.lr, at optim.eps, and whether the loss depends on the weights"
        )


def _bit_sums(weights: Sequence[nn.Parameter]) -> Tensor:
    """The sum of the bits of each weight as integers: equal weights have equal sums, and changed ones hardly ever."""
    # integers, because a sum of floats rounds small changes away
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensors = [local_tensor(weight.detach()) for weight in weights]
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    return torch.stack([tensor.view(kinds[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors])
