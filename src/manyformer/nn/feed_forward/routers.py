"""Routers: which experts process a token, and with which weights.

They keep the load even by losses (`mixture_of_experts`), or by a bias where experts are selected.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, NamedTuple, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.nn.feed_forward.expert_groups import NO_EXPERT
from manyformer.nn.runtime.device_reads import count_values
from manyformer.nn.runtime.recompute import choose_once
from manyformer.nn.runtime.torch_internals import autocast_disabled, compiler_disabled, is_plain, weight_dtype
from manyformer.nn.runtime.training_hooks import OptimizerHints, PostStepUpdate

ExpertWeighting = Literal["scores", "renormalized"]
"""Whether a chosen expert weighs as much as its score, or as its share of the scores of the chosen ones."""


class Routing(NamedTuple):
    """The experts of each token (`NO_EXPERT` for none) with their weights, and what losses of balance need.

    `probabilities` sum to 1 over all experts; `logits` are the numbers before them."""

    experts: Int[Tensor, "n k"]
    weights: Float[Tensor, "n k"]
    probabilities: Float[Tensor, "n e"]
    logits: Float[Tensor, "n e"]

    def load(self) -> Int[Tensor, " e"]:
        """The number of tokens that each expert was chosen for."""
        # shifted by one, so that NO_EXPERT is counted too and then left out
        return count_values(self.experts.detach() + 1, self.logits.shape[1] + 1)[1:]


@final
class SelectionBias(nn.Module, PostStepUpdate):
    """Raised by `rate` after each step for an expert with less than the mean load, lowered for one with more.

    Wang et al. 2024 (arXiv:2408.15664, algorithm 1), as in DeepSeek-V3 (arXiv:2412.19437, section 2.1.2). It decides
    which experts are chosen and never what they weigh, gets no gradient, does not change in evaluation and is saved
    with the weights. The load is that of all processes since the last step. Raises ValueError for a negative rate."""

    bias: Tensor

    def __init__(self, num_experts: int, rate: float = 1e-3) -> None:
        super().__init__()
        if rate < 0:
            raise ValueError(f"SelectionBias: rate ({rate}) must be at least 0")
        self.rate = rate
        self.register_buffer("bias", torch.zeros(num_experts))
        self._load: Tensor | None = None

    def forward(self, scores: Float[Tensor, "n e"]) -> Float[Tensor, "n e"]:
        """The scores by which experts are chosen."""
        return scores + self.bias.to(scores.dtype)

    def count(self, experts: Int[Tensor, "n k"]) -> None:
        """Count the experts chosen in training, for the next update."""
        if self.training and self.rate:
            choose_once(lambda: self._accumulate(experts))

    @compiler_disabled
    @torch.no_grad()
    def _accumulate(self, experts: Tensor) -> None:
        load = count_values(experts, len(self.bias)).to(self.bias.dtype)
        self._load = load if self._load is None else self._load + load

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if self._load is None:
            return
        # taken away first, so that the next step counts from zero
        load = self._load
        self._load = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(load)
        # the sign alone, as in the paper: the rate bounds how far an expert moves in a step
        self.bias.add_((load.mean() - load).sign(), alpha=self.rate)

    def extra_repr(self) -> str:
        return f"{len(self.bias)} experts, rate={self.rate}"


class Router(nn.Module, OptimizerHints, ABC):
    """Chooses `per_token` of `num_experts` experts for each token."""

    adamw_weights = ("proj.weight",)
    num_experts: int
    per_token: int

    @abstractmethod
    def forward(self, x: Float[Tensor, "n d"]) -> Routing:
        """The routing of tokens, whichever rows they stand in; scores are computed in float32 at least."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> Routing: ...


@final
class SoftmaxRouter(Router):
    """The experts with the largest of the probabilities softmax(W x).

    With the weighting "scores" and one expert it is the Switch Transformer's (Fedus et al. 2021, arXiv:2101.03961,
    section 2.1), "renormalized" Mixtral's (Jiang et al. 2024, arXiv:2401.04088, section 2.1), which equals a softmax
    over the logits of the chosen experts. `jitter` multiplies inputs in training by random numbers from 1 - `jitter` to
    1 + `jitter` (Fedus et al.). Raises UserError for numbers of experts that do not fit, and for a
    renormalized weight of one expert, which would be 1 whatever the router does."""

    def __init__(
        self,
        dim: int,
        num_experts: int,
        per_token: int,
        *,
        weighting: ExpertWeighting = "renormalized",
        bias: bool = False,
        jitter: float = 0.0,
    ) -> None:
        super().__init__()
        _check_counts(num_experts, per_token, weighting)
        self.num_experts = num_experts
        self.per_token = per_token
        self.weighting = weighting
        self.jitter = jitter
        self.proj = nn.Linear(dim, num_experts, bias=bias)

    def forward(self, x: Float[Tensor, "n d"]) -> Routing:
        if self.training and self.jitter:
            x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        logits = _router_logits(self.proj, x)
        probabilities = logits.softmax(-1)
        # the choice has no gradient, and a recomputed pass must choose the same experts
        experts = choose_once(lambda: probabilities.detach().topk(self.per_token).indices)
        weights = _weights(probabilities.gather(1, experts), self.weighting)
        return Routing(experts, weights, probabilities, logits)

    def extra_repr(self) -> str:
        return f"{self.per_token} of {self.num_experts}, weighting={self.weighting}, jitter={self.jitter}"


@final
class SigmoidRouter(Router):
    """The experts with the largest sigmoid(W x) + b, which weigh `scale` times their share of the sigmoids without b.

    DeepSeek-V3 (2024, arXiv:2412.19437, equations 12 to 16). Experts are in `groups` of equal size, and all come from
    the `groups_per_token` of them whose two best are best in sum, so that a token visits few machines. `selection_bias`
    is the b that balances the load, None for none. Raises UserError for numbers that do not fit."""

    def __init__(
        self,
        dim: int,
        num_experts: int,
        per_token: int,
        *,
        groups: int = 1,
        groups_per_token: int = 1,
        weighting: ExpertWeighting = "renormalized",
        scale: float = 1.0,
        selection_bias: SelectionBias | None = None,
    ) -> None:
        super().__init__()
        _check_counts(num_experts, per_token, weighting)
        if groups < 1 or num_experts % groups or (groups > 1 and num_experts < 2 * groups):
            raise UserError(f"SigmoidRouter: {num_experts} experts are not {groups} groups of 2 or more")
        if not 1 <= groups_per_token <= groups or per_token > groups_per_token * (num_experts // groups):
            raise UserError(
                f"SigmoidRouter: {per_token} experts must fit into {groups_per_token} groups per token, of {groups} "
                f"groups of {num_experts // groups} experts"
            )
        self.num_experts = num_experts
        self.per_token = per_token
        self.weighting = weighting
        self.scale = scale
        self.groups = groups
        self.groups_per_token = groups_per_token
        self.proj = nn.Linear(dim, num_experts, bias=False)
        self.selection_bias = selection_bias

    def forward(self, x: Float[Tensor, "n d"]) -> Routing:
        logits = _router_logits(self.proj, x)
        scores = logits.sigmoid()
        experts = choose_once(lambda: self._choose(scores.detach()))
        if self.selection_bias is not None:
            self.selection_bias.count(experts)
        weights = self.scale * _weights(scores.gather(1, experts), self.weighting)
        return Routing(experts, weights, scores / (scores.sum(-1, keepdim=True) + EPSILON), logits)

    def _choose(self, scores: Float[Tensor, "n e"]) -> Int[Tensor, "n k"]:
        scores = scores if self.selection_bias is None else self.selection_bias(scores)
        if self.groups_per_token < self.groups:
            by_group = scores.unflatten(1, (self.groups, -1))
            # a group is as good as its two best experts together
            best = by_group.topk(2, dim=-1).values.sum(-1).topk(self.groups_per_token).indices
            is_best = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, 1)
            scores = by_group.masked_fill(~is_best[..., None], -torch.inf).flatten(1)
        return scores.topk(self.per_token).indices

    def extra_repr(self) -> str:
        groups = ""
        if self.groups > 1:
            groups = f", from {self.groups_per_token} of {self.groups} groups"
        return f"{self.per_token} of {self.num_experts}{groups}, weighting={self.weighting}, scale={self.scale}"


@final
class RandomSecondRouter(Router):
    """`inner`, of whose experts all but the first are visited in training with probability weight / `threshold` only.

    GShard (Lepikhin et al. 2020, arXiv:2006.16668, section 2.2) and ST-MoE (Zoph et al. 2022,
    arXiv:2202.08906) save the visits that would change little. In evaluation all are made. Raises ValueError unless
    `threshold` is above 0."""

    def __init__(self, inner: Router, threshold: float = 0.5) -> None:
        super().__init__()
        if not threshold > 0:
            raise ValueError(f"RandomSecondRouter: threshold ({threshold}) must be above 0")
        self.inner = inner
        self.threshold = threshold
        self.num_experts = inner.num_experts
        self.per_token = inner.per_token

    def forward(self, x: Float[Tensor, "n d"]) -> Routing:
        routing = self.inner(x)
        if not self.training:
            return routing
        is_skipped = choose_once(
            lambda: torch.rand_like(routing.weights) * self.threshold > routing.weights.detach()
        ).clone()
        # the first expert is visited always, so that every token is processed
        is_skipped[:, 0] = False
        return routing._replace(experts=routing.experts.masked_fill(is_skipped, NO_EXPERT))

    def extra_repr(self) -> str:
        return f"threshold={self.threshold}"


EPSILON = 1e-20
"""Added to sums of sigmoids before a division: all those of a token may underflow."""


def _router_logits(proj: nn.Linear, x: Tensor) -> Tensor:
    """The logits in float32 at least: rounded to 8 bits, scores of different experts would often be equal."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    with autocast_disabled(x.device):
        if is_plain(proj, nn.Linear):
            return F.linear(x.to(dtype), proj.weight.to(dtype), None if proj.bias is None else proj.bias.to(dtype))
        # what another tool has made of it takes inputs of its own dtype
        logits: Tensor = proj(x.to(weight_dtype(proj)))
        return logits.to(dtype)


def _weights(scores: Float[Tensor, "n k"], weighting: ExpertWeighting) -> Float[Tensor, "n k"]:
    if weighting == "scores":
        return scores
    return scores / (scores.sum(-1, keepdim=True) + EPSILON)


def _check_counts(num_experts: int, per_token: int, weighting: ExpertWeighting) -> None:
    if not 1 <= per_token <= num_experts:
        raise UserError(f"experts per token ({per_token}) must be from 1 to the number of experts ({num_experts})")
    if weighting not in ("scores", "renormalized"):
        raise UserError(f"weighting ('{weighting}') must be scores or renormalized")
    if per_token == 1 and weighting == "renormalized":
        raise UserError(
            "the renormalized weight of 1 expert per token is 1 whatever the router does, so that it would not learn: "
            "choose 2 or more, or the weighting scores"
        )
