"""A feed-forward layer of experts, some of which process each token."""

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import (
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
from manyformer.device_reads import places_of, reads_are_free
from manyformer.experts.expert_layers import FeedForwardExperts, GatedExperts
from manyformer.experts.routers import Router, Routing
from manyformer.experts.routing_losses import RoutingLoss
from manyformer.ops.expert_groups import dispatch, drop_overflow


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
            experts = drop_overflow(experts, documents, self.router.num_experts, self.capacity_factor)
        y = dispatch(tokens, experts, routing.weights, self.experts, self.router.num_experts, host_reads=host_reads)
        if not self.training or not len(tokens):
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
    rows = torch.arange(len(x), device=x.device)[:, None]
    if places is None:
        return rows.expand(x.shape[:2]).flatten()
    segments = positions.segment_ids.expand(x.shape[:2])
    keys = (rows * (segments.max() + 1) + segments).flatten().index_select(0, places)
    sorted_keys, order = keys.sort()
    is_new = F.pad(sorted_keys[1:] != sorted_keys[:-1], (min(1, len(keys)), 0))
    return torch.empty_like(order).scatter_(0, order, is_new.cumsum(0))
