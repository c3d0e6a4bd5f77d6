"""A feed-forward layer of experts, some of which process each token, and the losses that spread tokens over them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.nn.core import (
    PADDING_SEGMENT,
    Context,
    ContiguousLayout,
    Layer,
    LayerOutput,
    PackedLayout,
    State,
    StepLayout,
    TokenPositions,
    no_watch,
)
from manyformer.nn.feed_forward.expert_groups import ExpertGroups, dispatch, drop_overflow
from manyformer.nn.feed_forward.routers import Router, Routing
from manyformer.nn.runtime.device_reads import count_values, places_of, reads_are_free
from manyformer.nn.runtime.devices import wide_dtype


@final
class ExpertLinear(nn.Module):
    """A linear projection for each expert, stored as one tensor.

    Every expert then has a gradient in each step, zero where it got no token, as sharded and averaged training need."""

    def __init__(self, num_experts: int, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(num_experts, outputs)) if bias else None
        for weight in self.weight.data:
            nn.init.xavier_uniform_(weight)

    def forward(self, x: Float[Tensor, "n i"], groups: ExpertGroups) -> Float[Tensor, "n o"]:
        """Project rows sorted by expert."""
        return groups.project(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        experts, outputs, inputs = self.weight.shape
        return f"{experts} experts, {inputs} -> {outputs}, bias={self.bias is not None}"


@final
class GatedUnit(nn.Module):
    """The product of two projections, one through an activation (Shazeer 2020, arXiv:2002.05202, section 2)."""

    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.activation = nn.SiLU() if activation is None else activation

    def forward(self, gate: Float[Tensor, "n m"], up: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        y: Tensor = self.activation(gate) * up
        return y


@final
class ClampedSwiGLU(nn.Module):
    """(up + 1) gate sigmoid(slope gate), with gate at most `limit` and up from -`limit` to `limit`.

    The unit of gpt-oss (OpenAI 2025, arXiv:2508.10925)."""

    def __init__(self, slope: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        self.slope = slope
        self.limit = limit

    def forward(self, gate: Float[Tensor, "n m"], up: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.slope * gate)

    def extra_repr(self) -> str:
        return f"slope={self.slope}, limit={self.limit}"


@final
class GatedExperts(nn.Module):
    """Gated feed-forward networks, as `GatedFeedForward` for tokens sorted by expert; the `unit` joins its two halves.

    `ff_dim` is the width of one expert."""

    def __init__(
        self, num_experts: int, dim: int, ff_dim: int, *, unit: nn.Module | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = ExpertLinear(num_experts, dim, ff_dim, bias=bias)
        self.up = ExpertLinear(num_experts, dim, ff_dim, bias=bias)
        self.down = ExpertLinear(num_experts, ff_dim, dim, bias=bias)
        self.unit = GatedUnit() if unit is None else unit

    @property
    def weights(self) -> Sequence[Tensor]:
        """All matrices (experts, outputs, inputs)."""
        return self.gate.weight, self.up.weight, self.down.weight

    def forward(self, x: Float[Tensor, "n d"], groups: ExpertGroups) -> Float[Tensor, "n d"]:
        y: Tensor = self.down(self.unit(self.gate(x, groups), self.up(x, groups)), groups)
        return y


@final
class FeedForwardExperts(nn.Module):
    """Feed-forward networks of two projections, as `FeedForward` for tokens sorted by expert."""

    def __init__(
        self, num_experts: int, dim: int, ff_dim: int, *, activation: nn.Module | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = ExpertLinear(num_experts, dim, ff_dim, bias=bias)
        self.down = ExpertLinear(num_experts, ff_dim, dim, bias=bias)
        self.activation = nn.ReLU() if activation is None else activation

    @property
    def weights(self) -> Sequence[Tensor]:
        """All matrices (experts, outputs, inputs)."""
        return self.up.weight, self.down.weight

    def forward(self, x: Float[Tensor, "n d"], groups: ExpertGroups) -> Float[Tensor, "n d"]:
        y: Tensor = self.down(self.activation(self.up(x, groups)), groups)
        return y


class RoutingLoss(ABC):
    """A function of the routing of the tokens of one call."""

    @abstractmethod
    def __call__(self, routing: Routing, documents: Int[Tensor, " n"]) -> Float[Tensor, ""]:
        """The loss of tokens, given the number of the document that each stands in; there is at least one token."""


@final
@dataclass(frozen=True)
class LoadBalanceLoss(RoutingLoss):
    """`weight` E sum_i f_i P_i: f_i is the share of assignments to expert i, P_i its mean probability.

    Fedus et al. 2021 (arXiv:2101.03961, equations 4 to 6), where a balanced load gives `weight`. With `scale="tokens"`
    f_i is the number of assignments over that of tokens, so that it gives `weight` times the experts per token; the
    models of Mixtral's family have that scale. The gradient flows through P_i alone. It is of the tokens of one call
    and one layer: small batches should be balanced no more than large ones, so a weight for them is smaller."""

    weight: float = 0.01
    scale: Literal["assignments", "tokens"] = "assignments"

    def __call__(self, routing: Routing, documents: Int[Tensor, " n"]) -> Float[Tensor, ""]:
        tokens, num_experts = routing.probabilities.shape
        if self.scale == "assignments":
            total = tokens * routing.experts.shape[1]
        else:
            total = tokens
        # a count of choices, through which no gradient flows
        load = routing.load().to(routing.probabilities.dtype) / total
        return self.weight * num_experts * (load * routing.probabilities.mean(0)).sum()


@final
@dataclass(frozen=True)
class SequenceBalanceLoss(RoutingLoss):
    """The mean over documents of `weight` sum_i f_i P_i, with f_i and P_i of the document's tokens (DeepSeek-V3).

    arXiv:2412.19437, equations 17 to 20: f_i is the share of assignments to expert i times the number of experts, so
    that a balanced load gives `weight`."""

    weight: float = 1e-4

    def __call__(self, routing: Routing, documents: Int[Tensor, " n"]) -> Float[Tensor, ""]:
        probabilities = routing.probabilities
        per_token = routing.experts.shape[1]
        num_experts = probabilities.shape[1]
        last = documents.max()
        # where reading their number takes long, as many as there could be, of which the others are empty
        if reads_are_free(documents):
            num_documents = int(last) + 1
        else:
            num_documents = documents.shape[0]
        lengths = count_values(documents, num_documents).clamp(min=1)[:, None].to(probabilities.dtype)
        # one cell for each document and expert; tokens without an expert add zero to that of expert 0
        cells = documents[:, None] * num_experts + routing.experts.clamp(min=0)
        is_assigned = (routing.experts >= 0).to(wide_dtype(cells.device))
        load = torch.zeros(num_documents * num_experts, dtype=is_assigned.dtype, device=cells.device)
        load = load.scatter_add_(0, cells.flatten(), is_assigned.flatten())
        shares = load.view(num_documents, num_experts).to(probabilities.dtype) * num_experts / (per_token * lengths)
        sums = probabilities.new_zeros(num_documents, num_experts).index_add(0, documents, probabilities)
        return self.weight * (shares * sums / lengths).sum() / (last + 1)


@final
@dataclass(frozen=True)
class RouterZLoss(RoutingLoss):
    """`weight` times the mean of logsumexp(logits)^2, which keeps logits small (Zoph et al. 2022, equation 5)."""

    weight: float = 1e-3

    def __call__(self, routing: Routing, documents: Int[Tensor, " n"]) -> Float[Tensor, ""]:
        return self.weight * routing.logits.logsumexp(-1).square().mean()


@final
class MixtureOfExperts(Layer):
    """The sum of the experts that `router` chooses for a token, by their weights (Shazeer et al. 2017, section 2).

    arXiv:1701.06538. `shared` experts are a layer that processes every token (DeepSeekMoE, Dai et al. 2024,
    arXiv:2401.06066, section 3.2). Padding is not routed and counts in no loss. `losses` are those of training. Without
    `capacity_factor` no token is dropped, and each is processed as it would be alone; with it, an expert processes at
    most that many times its share of the tokens of a document, and what exceeds it passes by: then the output for a
    token depends on the document's length, so that decoding cannot continue from a state. `ctx.watch` gets the "load",
    the share of assignments of each expert. Raises ValueError if the router and the experts differ in number, or
    unless `capacity_factor` is above 0."""

    content_based = True

    def __init__(
        self,
        router: Router,
        experts: GatedExperts | FeedForwardExperts,
        *,
        shared: Layer | None = None,
        losses: Sequence[RoutingLoss] = (),
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__()
        if router.num_experts != experts.num_experts:
            raise ValueError(f"the router has {router.num_experts} experts, and there are {experts.num_experts}")
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"MixtureOfExperts: capacity_factor ({capacity_factor}) must be above 0")
        self.router = router
        self.experts = experts
        self.shared = shared
        self.losses = tuple(losses)
        self.capacity_factor = capacity_factor

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        ctx.watch(self, "input", x)
        places = _token_places(ctx.positions, x)
        if places is None:
            tokens = x.flatten(0, 1)
        else:
            tokens = x.flatten(0, 1).index_select(0, places)
        routing = self.router(tokens)
        # the number of a static step's experts is not the host's to read, on whatever device
        host_reads = reads_are_free(x) and not isinstance(ctx.positions.layout, StepLayout)
        routed, loss = self._process(tokens, routing, _documents(ctx.positions, x, places), host_reads=host_reads)
        if ctx.watch is not no_watch:
            ctx.watch(self, "load", routing.load() / max(1, len(tokens) * self.router.per_token))
        if places is not None:
            # padding, which no expert has seen, gets zeros
            routed = routed.new_zeros(x.shape[0] * x.shape[1], routed.shape[1]).index_copy(0, places, routed)
        y = routed.view(*x.shape[:2], -1)
        if self.shared is not None:
            y = y + self.shared(x, ctx).y
        return LayerOutput(y, state, loss)

    def _process(
        self, tokens: Float[Tensor, "n d"], routing: Routing, documents: Int[Tensor, " n"], *, host_reads: bool
    ) -> tuple[Float[Tensor, "n d"], Tensor | float]:
        """The weighted sum of the chosen experts, and the losses of training."""
        experts = routing.experts
        if self.capacity_factor is not None:
            # only what is processed: losses and the load count what the router chose
            experts = drop_overflow(experts, documents, self.router.num_experts, self.capacity_factor)
        y = dispatch(tokens, experts, routing.weights, self.experts, self.router.num_experts, host_reads=host_reads)
        if not self.training or not tokens.shape[0]:
            return y, 0.0
        return y, sum((loss(routing, documents) for loss in self.losses), 0.0)

    def extra_repr(self) -> str:
        parts = [repr(loss) for loss in self.losses]
        parts += [] if self.capacity_factor is None else [f"capacity_factor={self.capacity_factor}"]
        return ", ".join(parts)


@final
class ScalarGate(Layer):
    """`inner` times sigmoid(w x), one number for each token, as the shared expert of Qwen2-MoE and Qwen3-Next has."""

    def __init__(self, inner: Layer, dim: int) -> None:
        super().__init__()
        self.inner = inner
        self.gate = nn.Linear(dim, 1, bias=False)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        y, state, loss = self.inner(x, ctx, state)
        return LayerOutput(self.gate(x).sigmoid() * y, state, loss)


def _token_places(positions: TokenPositions, x: Float[Tensor, "b l d"]) -> Int[Tensor, " m"] | None:
    """The tokens that are no padding, numbered in all rows one after another; None for all."""
    layout = positions.layout
    if isinstance(layout, ContiguousLayout | StepLayout):
        return None
    count = None
    if isinstance(layout, PackedLayout):
        count = layout.token_count
    return places_of((positions.segment_ids != PADDING_SEGMENT).expand(x.shape[:2]).flatten(), count)


def _documents(
    positions: TokenPositions, x: Float[Tensor, "b l d"], places: Int[Tensor, " m"] | None
) -> Int[Tensor, " m"]:
    """The number of the document, among those of all rows, of each token that is no padding."""
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    if places is None:
        return rows.expand(x.shape[:2]).flatten()
    segments = positions.segment_ids.expand(x.shape[:2])
    # a number that differs for documents of different rows, though their segment ids are equal
    keys = (rows * (segments.max() + 1) + segments).flatten().index_select(0, places)
    sorted_keys, order = keys.sort()
    is_new = F.pad(sorted_keys[1:] != sorted_keys[:-1], (min(1, keys.shape[0]), 0))
    # numbered without gaps, and brought back to the order of the tokens
    return torch.empty_like(order).scatter_(0, order, is_new.cumsum(0))
