"""Output heads, which map the residual stream to a distribution, and their losses: classes, levels, actions in a box.

The loss of the usual head, `ClassHead`, never holds the logits of all tokens where there are many classes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.nn.batches import IGNORE_INDEX
from manyformer.nn.batches.episode_batches import count_action_targets
from manyformer.nn.core import State
from manyformer.nn.ops.chunked_cross_entropy import LossOptions, chunked_cross_entropy
from manyformer.nn.positions.content_positions import capped
from manyformer.nn.runtime.torch_internals import autocast_disabled, has_hooks

MIN_CHUNKED_CLASSES = 8192
"""From this many classes on, the loss is computed in chunks of tokens: less memory and, on a CPU, less time."""

TOKENS_PER_CHUNK = 512
"""Tokens per chunk of the loss on a CPU."""

LOGITS_ELSEWHERE = 1 << 29
"""Logits of the loss that exist at once on other devices: 2 GiB in float32."""


class BatchLoss(NamedTuple):
    """The loss of one batch: the sum over targets in nats, the number of targets, and auxiliary losses per batch.

    `state` is the model's state after the batch if it was given a state before it.
    """

    total: Tensor
    targets: Tensor
    extra: Tensor | float = 0.0
    state: State = None


class BatchScore(NamedTuple):
    """The negative log-likelihood of all targets in nats without smoothing, their number, and how many were top-1.

    `state` is the model's state after the batch if it was given a state before it. `others` are further sums over the
    targets by name, the same names for every batch, which the task makes scores of.
    """

    nll: Tensor
    targets: Tensor
    correct: Tensor
    state: State = None
    others: Mapping[str, Tensor] = MappingProxyType({})

    def plus(self, score: "BatchScore") -> "BatchScore":
        """The sums of this batch and of one that continues it."""
        others = {name: value + score.others[name] for name, value in self.others.items()}
        return BatchScore(
            self.nll + score.nll, self.targets + score.targets, self.correct + score.correct, score.state, others
        )


class OutputHead(nn.Module, ABC):
    """Predicts a distribution over `classes` from the stream; logits are defined up to a constant per token."""

    classes: int
    score_chunk: ClassVar[int] = 4096
    """The number of tokens per chunk in `score`."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]: ...

    @abstractmethod
    def loss(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"], *, label_smoothing: float) -> BatchLoss:
        """The cross entropy summed over all targets that are not ignored."""

    def score(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"]) -> BatchScore:
        """Negative log-likelihood and accuracy, computed in chunks of tokens."""
        x = x.reshape(-1, x.shape[-1])
        targets = targets.reshape(-1)
        nll = torch.zeros((), dtype=torch.float64, device="cpu")
        correct = torch.zeros((), dtype=torch.long, device=x.device)
        for chunk, chunk_targets in zip(torch.split(x, self.score_chunk), torch.split(targets, self.score_chunk)):
            logits = self(chunk).float()
            loss = F.cross_entropy(logits, chunk_targets, ignore_index=IGNORE_INDEX, reduction="sum")
            # float64 on the host: the sum runs over a whole validation set
            nll = nll + loss.cpu().double()
            correct = correct + (logits.argmax(-1) == chunk_targets).sum()
        return BatchScore(nll, count_targets(targets), correct)


def apply_head(head: OutputHead | nn.Linear, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
    """The logits of the stream; empty ones for an empty stream, whose width is not always that of the last layer."""
    if x.numel():
        logits: Tensor = head(x)
        return logits
    return x.new_zeros(*x.shape[:-1], head.classes if isinstance(head, OutputHead) else head.out_features)


def count_targets(targets: Int[Tensor, "..."]) -> Tensor:
    """The number of targets that are not ignored."""
    return (targets != IGNORE_INDEX).sum()


def loss_of_logits(logits: Float[Tensor, "*b v"], targets: Int[Tensor, "*b"], *, label_smoothing: float) -> BatchLoss:
    """The cross-entropy of these logits, summed over the targets."""
    logits = logits.reshape(-1, logits.shape[-1])
    targets = targets.reshape(-1)
    total = F.cross_entropy(
        logits, targets, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing, reduction="sum"
    )
    return BatchLoss(total, count_targets(targets))


@final
class ClassHead(OutputHead):
    """A projection to `classes` logits after an optional `transform`; `tied` is an embedding whose matrix is reused.

    Tying follows Press and Wolf (2017). The loss equals `torch.nn.functional.cross_entropy` of the logits.
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        tied: nn.Embedding | None = None,
        transform: nn.Module | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.transform = transform
        self.classes = classes
        self.weight = nn.Parameter(torch.empty(classes, dim)) if tied is None else tied.weight
        self.bias = nn.Parameter(torch.zeros(classes)) if bias else None
        if tied is None:
            nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        return F.linear(x if self.transform is None else self.transform(x), self.weight, self.bias)

    def loss(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"], *, label_smoothing: float) -> BatchLoss:
        if has_hooks(self):
            # they see, and may change, the logits of all tokens
            return loss_of_logits(self(x), targets, label_smoothing=label_smoothing)
        x = x if self.transform is None else self.transform(x)
        x = x.reshape(-1, x.shape[-1])
        targets = targets.reshape(-1)
        # logits are the largest tensor of a language model, of which chunks never hold all
        tokens_per_chunk = self._tokens_per_chunk(x)
        if x.shape[0] <= tokens_per_chunk:
            logits = F.linear(x, self.weight, self.bias)
            return loss_of_logits(logits, targets, label_smoothing=label_smoothing)
        count = count_targets(targets)
        options = LossOptions(IGNORE_INDEX, label_smoothing, tokens_per_chunk)
        return BatchLoss(chunked_cross_entropy(x, self.weight, self.bias, targets, options), count)

    def _tokens_per_chunk(self, x: Float[Tensor, "n d"]) -> int:
        """Tokens whose logits are computed at a time: all of them where that is no slower."""
        # shapes without a device are those of a plan, which is held to measurements on a CPU
        if x.device.type not in ("cpu", "meta"):
            return LOGITS_ELSEWHERE // self.classes
        if self.classes < MIN_CHUNKED_CLASSES:
            return x.shape[0]
        return TOKENS_PER_CHUNK


@final
class CappedClassHead(OutputHead):
    """A projection to `classes` logits z, which become cap tanh(z / cap) (Gemma 2, 2024, arXiv:2408.00118, section 2).

    `tied` is an embedding whose matrix is reused."""

    def __init__(self, dim: int, classes: int, cap: float, *, tied: nn.Embedding | None = None) -> None:
        super().__init__()
        self.classes = classes
        self.cap = cap
        self.weight = nn.Parameter(torch.empty(classes, dim)) if tied is None else tied.weight
        if tied is None:
            nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        return capped(F.linear(x, self.weight), self.cap)

    def loss(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"], *, label_smoothing: float) -> BatchLoss:
        return loss_of_logits(self(x), targets, label_smoothing=label_smoothing)


@final
class LogitsHead(OutputHead):
    """The stream itself as the logits of `classes`."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        return x

    def loss(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"], *, label_smoothing: float) -> BatchLoss:
        logits = x.reshape(-1, self.classes)
        targets = targets.reshape(-1)
        total = F.cross_entropy(
            logits, targets, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing, reduction="sum"
        )
        return BatchLoss(total, count_targets(targets))


MIN_LOG_SCALE = -7.0
"""The minimum log-scale of a distribution, as in the released code of PixelCNN++."""

SPECIAL_TOKEN_LOGIT = -15.0
"""The logit of special tokens; the logits of levels are log-probabilities, so that special tokens are improbable."""


@final
class LogisticMixture(OutputHead):
    """`mixtures` logistic distributions per token, discretized to one bin per level (PixelCNN++).

    Salimans et al. 2017, section 2.1. Classes from `first` on are levels in ascending order; the classes below are
    special tokens, which are never targets: each has probability exp(-15), so that every logit is finite. A token is
    one value of one channel, and the channels of a color depend on each other through the stream, as all values do;
    the paper's means that depend linearly on earlier channels are for models that predict all values of a pixel at
    once. Means are initialized evenly between -1 and 1.
    """

    score_chunk: ClassVar[int] = 512

    def __init__(self, dim: int, classes: int, mixtures: int, *, first: int) -> None:
        super().__init__()
        self.classes = classes
        self.first = first
        self.levels = classes - first
        if self.levels < 2 or mixtures < 1:
            raise ValueError(
                f"LogisticMixture: {classes} classes from {first} on are {self.levels} levels, and there must be at "
                f"least 2, and mixtures ({mixtures}) at least 1"
            )
        self.project = nn.Linear(dim, 3 * mixtures)
        nn.init.xavier_uniform_(self.project.weight)
        weight, mean, log_scale = self.project.bias.data.view(3, mixtures)
        weight.zero_()
        # evenly over the levels, each as wide as the gap to the next
        mean.copy_((2 * torch.arange(mixtures) + 1) / mixtures - 1)
        log_scale.fill_(-math.log(mixtures))

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        weight, mean, log_scale = self._mixture_parameters(x)
        log_probs = torch.logsumexp(weight[..., None] + log_levels(mean, log_scale, self.levels), dim=-2)
        # special tokens come before the levels
        return F.pad(log_probs, (self.first, 0), value=SPECIAL_TOKEN_LOGIT)

    def loss(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"], *, label_smoothing: float) -> BatchLoss:
        count = count_targets(targets)
        if label_smoothing:
            # label smoothing needs the log-probabilities of all levels
            logits = self(x).flatten(0, -2)
            target_ids = targets.flatten()
            total = F.cross_entropy(
                logits, target_ids, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing, reduction="sum"
            )
            return BatchLoss(total, count)
        weight, mean, log_scale = self._mixture_parameters(x)
        level = targets - self.first
        log_prob = torch.logsumexp(weight + log_level(mean, log_scale, level.clamp(min=0), self.levels), dim=-1)
        logit = torch.where(level < 0, SPECIAL_TOKEN_LOGIT, log_prob)
        # normalizes: the probabilities of levels and special tokens sum to slightly more than 1
        nll = math.log1p(self.first * math.exp(SPECIAL_TOKEN_LOGIT)) - logit
        return BatchLoss(nll.masked_fill(targets == IGNORE_INDEX, 0.0).sum(), count)

    def _mixture_parameters(self, x: Float[Tensor, "*b d"]) -> tuple[Tensor, Tensor, Tensor]:
        """The log-weight, mean and log-scale of each distribution (*b, k)."""
        # a narrow distribution amplifies the rounding errors of its mean
        with autocast_disabled(x.device):
            raw = self.project(x if x.dtype == torch.float64 else x.float())
        weight, mean, log_scale = raw.unflatten(-1, (3, -1)).unbind(-2)
        return weight.log_softmax(-1), mean, log_scale.clamp(min=MIN_LOG_SCALE)


Bounds = tuple[float, ...]
"""The lowest or the highest value of each component of an action."""

MAX_BOUND = 1e30
"""Beyond it the size of a box may not be a number of 32 bits."""

NEAR = 0.1
"""An action is right if all of its components are as near to those of the target, in units of half the box."""


@final
class BoundedActionHead(OutputHead):
    """Continuous actions as tanh of a projection, scaled to a box; that of Chen et al. 2021 is -1 to 1 (section 3).

    The loss is the squared error in units of half the box, averaged over the components. Targets that do not count are
    NaN. Raises UserError if the bounds are not one finite range for each component."""

    low: Float[Tensor, " a"]
    high: Float[Tensor, " a"]

    def __init__(self, dim: int, actions: int, low: Bounds | None = None, high: Bounds | None = None) -> None:
        super().__init__()
        lowest = [-1.0] * actions if low is None else low
        highest = [1.0] * actions if high is None else high
        if len(lowest) != actions or len(highest) != actions:
            raise UserError(f"action_low ({low}) and action_high ({high}) must have a number for each of {actions}")
        if not all(-MAX_BOUND < lower < upper < MAX_BOUND for lower, upper in zip(lowest, highest)):
            raise UserError(
                f"action_low ({low}) must be below action_high ({high}) in every number, all of them finite"
            )
        self.classes = actions
        self.project = nn.Linear(dim, actions)
        self.register_buffer("low", torch.tensor(lowest))
        self.register_buffer("high", torch.tensor(highest))

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b a"]:
        unit: Tensor = self.project(x).tanh()
        # tanh gives -1 to 1
        return self.low + (unit + 1) * ((self.high - self.low) / 2)

    def normalize(self, actions: Float[Tensor, "*b a"]) -> Float[Tensor, "*b a"]:
        """The actions with the box mapped to -1 to 1."""
        return (actions - self.low) * (2 / (self.high - self.low)) - 1

    def loss(self, x: Float[Tensor, "*b d"], targets: Any, *, label_smoothing: float) -> BatchLoss:
        if label_smoothing:
            raise UserError(f"loss.label_smoothing ({label_smoothing}) is for discrete actions; these are continuous")
        return BatchLoss(self._errors(x, targets).float().square().mean(-1).sum(), count_action_targets(targets))

    def score(self, x: Float[Tensor, "*b d"], targets: Any) -> BatchScore:
        errors = self._errors(x, targets)
        nll = errors.float().square().mean(-1).cpu().double().sum()
        is_right = (errors.abs() <= NEAR).all(-1) & ~targets[..., 0].isnan()
        return BatchScore(nll, count_action_targets(targets), is_right.sum())

    def _errors(self, x: Float[Tensor, "*b d"], targets: Float[Tensor, "*b a"]) -> Float[Tensor, "*b a"]:
        """The differences in units of half the box, 0 where the target does not count."""
        scored = ~targets.isnan()
        # replaced before the difference: the gradient of a NaN is NaN even where its weight is zero
        unit: Tensor = self.project(x).tanh()
        return (unit - self.normalize(torch.where(scored, targets, self.low))) * scored


def log_levels(
    mean: Float[Tensor, "*b k"], log_scale: Float[Tensor, "*b k"], levels: int
) -> Float[Tensor, "*b k levels"]:
    """The log-probability of every level under each discretized logistic distribution, exact and without overflow.

    Level i of n stands for 2 i / (n - 1) - 1, between -1 and 1, and its bin extends half a step to both sides; those of
    the lowest and the highest level are open (Salimans et al. 2017, PixelCNN++, section 2.1). With the logistic
    function s, s(a) - s(b) = s(a) s(-b) (1 - exp(b - a)): factors below 1 whose logarithms add up, where a difference
    of two numbers near 1 would lose all digits."""
    edges = _upper_edge(torch.arange(levels - 1, device=mean.device, dtype=mean.dtype), levels)
    standardized = (edges - mean[..., None]) * torch.exp(-log_scale)[..., None]
    below = F.logsigmoid(standardized)
    # log s(-a) = log s(a) - a: the rounding error for a far below 0 is small relative to `below`
    above = below - standardized
    # both ends are open
    inner = _log_bin_width(log_scale, levels)[..., None].expand(*log_scale.shape, levels - 2)
    return F.pad(below, (0, 1)) + F.pad(above, (1, 0)) + F.pad(inner, (1, 1))


def log_level(
    mean: Float[Tensor, "*b k"], log_scale: Float[Tensor, "*b k"], level: Int[Tensor, "*b"], levels: int
) -> Float[Tensor, "*b k"]:
    """The log-probability of one level for each row, as training needs it."""
    number = level[..., None].to(mean.dtype)
    rate = torch.exp(-log_scale)
    lowest = number == 0
    highest = number == levels - 1
    below = F.logsigmoid((_upper_edge(number, levels) - mean) * rate).masked_fill(highest, 0.0)
    above = F.logsigmoid((mean - _upper_edge(number - 1, levels)) * rate).masked_fill(lowest, 0.0)
    return below + above + _log_bin_width(log_scale, levels).masked_fill(lowest | highest, 0.0)


def _upper_edge(number: Float[Tensor, "*n"], levels: int) -> Float[Tensor, "*n"]:
    """Upper edge of the bin of level `number`: integer arithmetic up to one division, so that it is exact."""
    return (2 * number + 2 - levels) / (levels - 1)


def _log_bin_width(log_scale: Float[Tensor, "*b k"], levels: int) -> Float[Tensor, "*b k"]:
    """log(1 - exp(-step / scale)) for the step between levels, the term of the bin's width."""
    return torch.log(-torch.expm1(-2 / (levels - 1) * torch.exp(-log_scale)))
