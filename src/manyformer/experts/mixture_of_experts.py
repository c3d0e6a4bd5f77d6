"""A feed-forward layer of experts, some of which process each token."""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.core import (
    PADDING_SEGMENT,
    Context,
    ContiguousLayout,
    Layer,
    LayerOutput,
    State,
    StepLayout,
    TokenPositions,
    no_watch,
)
from manyformer.experts.expert_layers import FeedForwardExperts, GatedExperts
from manyformer.experts.routers import Router, Routing
from manyformer.experts.routing_losses import RoutingLoss
from manyformer.ops.expert_dispatch import dispatch, dispatch_fixed, drop_overflow


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
        self.router, self.experts, self.shared = router, experts, shared
        self.losses, self.capacity_factor = tuple(losses), capacity_factor

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        ctx.watch(self, "input", x)
        if self._decodes(x, ctx):
            return LayerOutput(self._decode(x, ctx), state)
        valid = _valid_tokens(ctx.positions, x)
        tokens = x.flatten(0, 1) if valid is None else x.flatten(0, 1)[valid]
        routing = self.router(tokens)
        routed, loss = self._process(tokens, routing, _documents(ctx.positions, x, valid))
        if ctx.watch is not no_watch:
            ctx.watch(self, "load", routing.load() / max(1, len(tokens) * self.router.per_token))
        if valid is not None:
            routed = routed.new_zeros(valid.shape[0], routed.shape[1]).masked_scatter(valid[:, None], routed)
        y = routed.view(*x.shape[:2], -1)
        if self.shared is not None:
            y = y + self.shared(x, ctx).y
        return LayerOutput(y, state, loss)

    def _decodes(self, x: Float[Tensor, "b l d"], ctx: Context) -> bool:
        """Whether these are single tokens whose experts the host does not read: in a static step, and on a GPU."""
        if isinstance(ctx.positions.layout, StepLayout):
            return self.capacity_factor is None
        is_plain = not self.training and self.capacity_factor is None and ctx.watch is no_watch
        return is_plain and x.shape[1] == 1 and x.device.type == "cuda" and not torch.is_grad_enabled()

    def _decode(self, x: Float[Tensor, "b 1 d"], ctx: Context) -> Float[Tensor, "b 1 d"]:
        tokens = x[:, 0]
        routing = self.router(tokens)
        routed = dispatch_fixed(
            tokens, routing.experts, routing.weights, self.experts.for_groups, self.router.num_experts
        )
        # a token of a row may be padding unless it is decoded
        y = routed[:, None].masked_fill((ctx.positions.segment_ids == PADDING_SEGMENT)[..., None], 0.0)
        return y if self.shared is None else y + self.shared(x, ctx).y

    def _process(
        self, tokens: Float[Tensor, "n d"], routing: Routing, documents: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, "n d"], Tensor | float]:
        """The weighted sum of the chosen experts, and the losses of training."""
        experts = routing.experts
        if self.capacity_factor is not None:
            experts = drop_overflow(experts, documents, self.router.num_experts, self.capacity_factor)
        y = dispatch(tokens, experts, routing.weights, self.experts, self.router.num_experts)
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
        self.inner, self.gate = inner, nn.Linear(dim, 1, bias=False)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        y, state, loss = self.inner(x, ctx, state)
        return LayerOutput(self.gate(x).sigmoid() * y, state, loss)


def _valid_tokens(positions: TokenPositions, x: Float[Tensor, "b l d"]) -> Bool[Tensor, " n"] | None:
    """Which tokens are no padding, in all rows one after another; None for all."""
    if isinstance(positions.layout, ContiguousLayout):
        return None
    return (positions.segment_ids != PADDING_SEGMENT).expand(x.shape[:2]).flatten()


def _documents(
    positions: TokenPositions, x: Float[Tensor, "b l d"], valid: Bool[Tensor, " n"] | None
) -> Int[Tensor, " m"]:
    """The number of the document, among those of all rows, of each token that is no padding."""
    rows = torch.arange(len(x), device=x.device)[:, None]
    if valid is None:
        return rows.expand(x.shape[:2]).flatten()
    segments = positions.segment_ids.expand(x.shape[:2])
    keys = (rows * (segments.max() + 1) + segments).flatten()[valid]
    numbers: Tensor = torch.unique(keys, return_inverse=True)[1]
    return numbers
